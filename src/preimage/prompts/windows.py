"""Windows of a fixed length, cut from tokenised documents and spread over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

# A stream may never end, so windows are chosen from a pool: several times what is wanted, and from
# enough documents that no single one speaks for the source.
POOL_WINDOWS_PER_PROMPT = 4
POOL_DOCUMENTS = 64


def cut(ids: Sequence[int], length: int, begin: int | None) -> list[tuple[int, ...]]:
    """All whole windows of ``length`` tokens from one document's ids, in order, without overlap.

    ``begin``: the BOS id to start every window with (it counts towards ``length``, which must then
    be at least 2), or None. The tokens left over at the end are dropped.
    """
    head = () if begin is None else (begin,)
    if head and ids and ids[0] == begin:
        ids = ids[1:]
    step = length - len(head)
    last = len(ids) - step
    return [(*head, *ids[start : start + step]) for start in range(0, last + 1, step)]


def spread(
    documents: Iterable[list[tuple[int, ...]]], rng: Random, count: int | None
) -> Iterator[tuple[int, ...]]:
    """Yield every window once: one of each document, then a second of each, and so on.

    ``documents``: the windows of each document. ``count``: how many windows will be wanted, None
    for all. Documents are read as far as needed: a pool, its windows in an order ``rng`` decides,
    then the next pool. Stop asking and the rest is never read.
    """
    pool: list[list[tuple[int, ...]]] = []
    size = 0
    for windows in documents:
        if not windows:
            continue
        pool.append(windows)
        size += len(windows)
        if count is None or len(pool) < min(count, POOL_DOCUMENTS):
            continue
        if size >= POOL_WINDOWS_PER_PROMPT * count:
            yield from _round_robin(pool, rng)
            pool, size = [], 0
    yield from _round_robin(pool, rng)


def _round_robin(pool: list[list[tuple[int, ...]]], rng: Random) -> Iterator[tuple[int, ...]]:
    queues = [rng.sample(windows, len(windows)) for windows in pool]
    rng.shuffle(queues)
    while queues:
        yield from (queue.pop() for queue in queues)
        queues = [queue for queue in queues if queue]
