"""Which prompts share a pass, and which passes make a piece: the unit that is kept, and handed out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from preimage.states.layout import Layout

_KEPT_TOKENS = 1024  # about a second of a small model on a CPU: so much is lost at most, or one batch


class Batch(NamedTuple):
    """Prompts of one group that share a pass, and the row of the first in the group's tensors."""

    group: int
    row: int
    prompts: tuple[int, ...]


class Piece(NamedTuple):
    """Prompts start..stop in the order of a layout: lengths ascending, then as they were given."""

    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its name in a ledger."""
        return f"{self.start}-{self.stop}"

    @classmethod
    def of(cls, key: str) -> Piece:
        """The piece of a name."""
        start, _, stop = key.partition("-")
        return cls(int(start), int(stop))


class Part(NamedTuple):
    """Rows of one group that belong to a piece."""

    group: int
    start: int
    stop: int


def parts_of(layout: Layout, piece: Piece) -> list[Part]:
    """The rows of every group in a piece."""
    parts, begin = [], 0
    for index, group in enumerate(layout.groups):
        start, stop = max(piece.start - begin, 0), min(piece.stop - begin, len(group.prompts))
        if start < stop:
            parts.append(Part(index, start, stop))
        begin += len(group.prompts)
    return parts


def cut(layout: Layout, batch_tokens: int, piece: Piece) -> dict[Piece, list[Batch]]:
    """A stretch of prompts in pieces of at least so many tokens, each in batches of at most ``batch_tokens``.

    Whatever piece of the same cut one begins with, what follows is cut in the same way.
    """
    pieces: dict[Piece, list[Batch]] = {}
    batches: list[Batch] = []
    begun = done = piece.start
    tokens = 0
    for part in parts_of(layout, piece):
        group = layout.groups[part.group]
        size = max(1, batch_tokens // max(1, group.length))
        for row in range(part.start, part.stop, size):
            batches.append(Batch(part.group, row, group.prompts[row : min(row + size, part.stop)]))
            done += len(batches[-1].prompts)
            tokens += len(batches[-1].prompts) * group.length
            if tokens >= _KEPT_TOKENS:
                pieces[Piece(begun, done)] = batches
                batches, tokens, begun = [], 0, done
    return pieces | ({Piece(begun, done): batches} if batches else {})


def missing(count: int, finished: Iterable[Piece]) -> list[Piece]:
    """The stretches of ``count`` prompts that no finished piece covers."""
    gaps, end = [], 0
    for start, stop in sorted(finished):
        if start > end:
            gaps.append(Piece(end, start))
        end = max(end, stop)
    return gaps + ([Piece(end, count)] if end < count else [])
