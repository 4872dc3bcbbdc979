"""The closest of many pairs, met in any order."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_WAITING = 2**16  # pairs that gather before the best are taken


class Closest:
    """The ``count`` closest pairs met so far, ties to the lower first index, then to the lower second.

    A pair may be met several times and counts once, with the distance it was met with first.
    """

    def __init__(self, count: int, columns: int) -> None:
        self._count, self._columns = count, columns
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def add(self, i: Int[Tensor, " pair"], j: Int[Tensor, " pair"], away: Float[Tensor, " pair"]) -> None:
        """Pairs of rows i and columns j."""
        self._waiting.append((i * self._columns + j, away))
        self._length += len(i)
        if self._length > self._count + _WAITING:
            self._settle()

    @property
    def distances(self) -> Float[Tensor, " some"]:
        """Their distances, nearest first."""
        return self._settle()[1]

    def ranked(self) -> list[tuple[int, int, float]]:
        """(i, j, distance), nearest first."""
        keys, away = self._settle()
        i, j = keys // self._columns, keys % self._columns
        return list(zip(i.tolist(), j.tolist(), away.tolist(), strict=True))

    def _settle(self) -> tuple[Tensor, Tensor]:
        keys, away = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        keys, order = keys.sort(stable=True)
        away, new = away[order], torch.ones_like(keys, dtype=torch.bool)
        new[1:] = keys[1:] != keys[:-1]  # met first: the sort is stable
        keys, away = keys[new], away[new]
        away, order = away.sort(stable=True)
        kept = keys[order][: self._count], away[: self._count]
        self._waiting, self._length = [kept], len(kept[0])
        return kept
