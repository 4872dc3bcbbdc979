"""Prompts that collide at every theta, put into words from the prompts alone.

A class of prompts is described by the first of a list of plain hypotheses that gives exactly this class among
all prompts looked at: the same last k tokens, the same with a repeated token counted once, and either of them
at one length. The hypotheses know nothing of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

from preimage.collisions import shortest_word

UNNAMED = "unnamed"
Ids = tuple[int, ...]


def classes(count: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Prompts joined by pairs, each class in order; prompts without a pair are left out."""
    root = list(range(count))

    def find(item: int) -> int:
        while root[item] != item:
            item = root[item]
        return item

    for first, second in pairs:
        low, high = sorted((find(first), find(second)))
        root[high] = low
    groups: dict[int, list[int]] = {}
    for item in range(count):
        groups.setdefault(find(item), []).append(item)
    return [group for group in groups.values() if len(group) > 1]


def describe(groups: Sequence[Sequence[int]], prompts: Sequence[Ids]) -> list[str]:
    """What the prompts of each class share and no other prompt does; "unnamed" where no hypothesis fits."""
    descriptions = [UNNAMED] * len(groups)
    for words, key in _hypotheses(max(map(len, prompts))):
        keys = [key(ids) for ids in prompts]
        sizes = Counter(keys)
        for number, members in enumerate(groups):
            shared = {keys[place] for place in members}
            if descriptions[number] == UNNAMED and len(shared) == 1 and sizes[shared.pop()] == len(members):
                descriptions[number] = words
    return descriptions


def _hypotheses(longest: int) -> Iterator[tuple[str, Callable[[Ids], Hashable]]]:
    """Descriptions and what they say two prompts have in common, the simplest first."""
    for length in (False, True):
        ending = ", and the same length" if length else ""
        for last in range(1, longest + 1):
            yield _last(last, longest) + ending, _key(last, longest, length)
            every = "" if last == longest else f" in all of the last {last} places there are"
            yield f"one token repeated{every}{ending}", _key(last, 0, length)
            for most in range(1, last - 1):
                words = f"{_last(last, longest)}, a run at their beginning counted {most} times at most"
                yield words + ending, _key(last, most, length)
    yield "one word repeated", shortest_word


def _last(last: int, longest: int) -> str:
    if last == longest:
        return "the same tokens"
    return "the same last token" if last == 1 else f"the same last {last} tokens"


def _key(last: int, most: int, length: bool) -> Callable[[Ids], Hashable]:
    """The last tokens, a run at their beginning cut down to ``most``, and to one token if it is all of them.

    0 cuts down none but the whole run, ``most`` of at least ``last`` none at all.
    """

    def key(ids: Ids) -> Hashable:
        seen = ids[-last:]
        run = next((place for place, token in enumerate(seen) if token != seen[0]), len(seen))
        if run == len(seen) and most < last:
            seen = seen[:1]
        elif most:
            seen = seen[max(0, run - most) :]
        return (len(ids), seen) if length else seen

    return key
