"""The certified scan of all pairs: screened by products, decided by float64 differences.

What is reported does not depend on tiles, their order, the arithmetic of the screen or the device: every
pair the screen cannot exclude is recomputed from the original rows by a distance that is a function of the
two rows alone, and ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from preimage.devices import by_device
from preimage.distances.arithmetic import ARITHMETICS, LADDERS
from preimage.distances.direct import row_distances
from preimage.distances.histogram import Histogram
from preimage.distances.rows import RowSet
from preimage.distances.screen import EachTile, Screen, here
from preimage.errors import OptionError

_CERTIFIED = {"cpu": 2**10, "cuda": 2**17}  # pairs recomputed at once
_LOOKED_AT = 2**14  # rows whose minima are looked at together
_SAMPLE = 128  # rows that tell whether an arithmetic serves
_TOO_MANY = 0.02  # share of all blocks a screen may leave open before a finer one is used

# Pairs as they come: rows, columns, distances.
Pairs: TypeAlias = tuple[Int[Tensor, " pair"], Int[Tensor, " pair"], Float[Tensor, " pair"]]


class Nearest(NamedTuple):
    """For every row the nearest other row, the lower index where several are as near."""

    indices: Int[Tensor, " row"]
    distances: Float[Tensor, " row"]


class Screened(NamedTuple):
    """A finished screen of the distinct rows, filled up to whole blocks.

    ``minima``: for each row the smallest screened value in each block of columns. ``limits`` and ``open``:
    squared distances no nearest neighbour exceeds, and the blocks in which one may be.
    """

    screen: Screen
    minima: Float[Tensor, "row block"]
    histogram: Histogram | None
    limits: Float[Tensor, " row"]
    open: Bool[Tensor, "row block"]


class PairScan:
    """All pairs within one set of rows, or between two; of equal rows only the first is looked at.

    ``arithmetic`` names the screen's, None chooses by the data; ``each`` runs the tiles, here or elsewhere,
    or finds what was kept of them; ``counting`` counts all distances on the way, for
    :func:`~preimage.distances.pairs.distance_distribution`, which otherwise takes a pass of its own.
    """

    def __init__(
        self,
        vectors: Shaped[Tensor, "row d"],
        others: Shaped[Tensor, "column d"] | None = None,
        *,
        arithmetic: str | None = None,
        tile: int | None = None,
        each: EachTile = here,
        counting: bool = False,
    ) -> None:
        self.rows = RowSet(vectors)
        self.one_set = others is None
        self.columns = self.rows if others is None else RowSet(others)
        count, against = len(vectors), len(self.columns.x)
        self.pairs = count * (count - 1) // 2 if self.one_set else count * against
        if self.pairs == 0:
            given = f"{count} rows make" if self.one_set else f"{count} and {against} rows make"
            raise OptionError(f"{given} no pair.", "Give at least two, or one on each side.")
        if self.rows.x.shape[1] != self.columns.x.shape[1]:
            raise OptionError(
                f"Rows of {vectors.shape[1]} and {self.columns.x.shape[1]} numbers have no distance.",
                "Give two sets of the same width.",
            )
        self._arithmetic, self._tile, self._each, self._counting = arithmetic, tile, each, counting

    @property
    def any_distinct(self) -> bool:
        """Whether there are pairs of rows that are not known to be equal."""
        return len(self.rows.firsts) > 1 or not self.one_set

    @property
    def arithmetic(self) -> str:
        """The arithmetic the screen ran in; exact where nothing was left to screen."""
        return self.screened.screen.arithmetic.name if self.any_distinct else "exact"

    @cached_property
    def nearest(self) -> Nearest:
        """The nearest other row of every row; at distance 0 where another row is equal to it."""
        rows = self.rows
        indices = torch.zeros(len(rows.x), dtype=torch.long, device=rows.x.device)
        distances = torch.zeros(len(rows.x), dtype=torch.float64, device=rows.x.device)
        if self.any_distinct:
            among, away = self.nearest_distinct
            indices[rows.firsts], distances[rows.firsts] = self.columns.firsts[among], away
        if not self.one_set:
            return Nearest(indices[rows.same], distances[rows.same])
        # within one set: the first of a group is nearest to the second, all others to the first
        repeats = rows.repeats
        indices[repeats], distances[repeats] = rows.same[repeats], 0.0
        second = torch.full_like(indices, len(rows.x))
        second.scatter_reduce_(0, rows.same[repeats], repeats, "amin")
        repeated = second < len(rows.x)
        indices[repeated], distances[repeated] = second[repeated], 0.0
        return Nearest(indices, distances)

    @cached_property
    def nearest_distinct(self) -> Nearest:
        """The nearest of every distinct row among the distinct columns, by their places among those."""
        count, none, device = len(self.rows.firsts), len(self.columns.firsts), self.rows.x.device
        best = torch.full((count,), torch.inf, dtype=torch.float64, device=device)
        index = torch.full((count,), none, device=device)
        for i, j, away in self._certified(self.screened.open, self.screened.limits):
            before = best.clone()
            best.scatter_reduce_(0, i, away, "amin")
            index[best < before] = none
            tied = away == best[i]
            index.scatter_reduce_(0, i[tied], j[tied], "amin")
        return Nearest(index, best)

    def pairs_within(self, radius: float) -> Iterator[Pairs]:
        """Pairs of rows that differ, no farther apart than ``radius``; i < j within one set.

        Of equal rows only the first is named.
        """
        return self._named(self.distinct_within(radius))

    def pairs_within_each(self, radii: Float[Tensor, " row"]) -> Iterator[Pairs]:
        """For every row the others that differ from it, no farther away than the row's own radius.

        Of equal rows only the first is named, with its own radius. A pair may come from either end.
        """
        return self._named(self.distinct_within(radii[self.rows.firsts], ordered=False))

    def distinct_within(
        self, radius: Float[Tensor, " distinct"] | float, *, inclusive: bool = True, ordered: bool = True
    ) -> Iterator[Pairs]:
        """The same by places among the distinct rows; exclusive: nearer than the radius."""
        if not self.any_distinct:
            return
        radii = torch.zeros(len(self.rows.firsts), dtype=torch.float64, device=self.rows.x.device)
        radii[:] = radius
        for i, j, away in self.distinct_open(radii):
            near = (away <= radii[i]) if inclusive else (away < radii[i])
            if self.one_set and ordered:
                near &= i < j
            if bool(near.any()):
                yield i[near], j[near], away[near]

    def distinct_open(self, radii: Float[Tensor, " distinct"]) -> Iterator[Pairs]:
        """Every pair the screen cannot place beyond its row's radius, by places among the distinct rows."""
        screen, minima = self.screened.screen, self.screened.minima
        every = torch.arange(len(minima), device=minima.device)
        padded = torch.zeros(len(minima), dtype=torch.float64, device=minima.device)
        padded[: len(radii)] = radii
        limits = screen.squared_limits(every, padded)
        parts = every.split(_LOOKED_AT)
        open_ = torch.cat([screen.open_blocks(rows, minima[rows], limits[rows])[0] for rows in parts])
        return self._certified(open_, limits)

    @cached_property
    def screened(self) -> Screened:
        """The screen of the distinct rows, run when first asked for."""
        screen = self.screen
        histogram = Histogram(self.rows.x.device) if self._counting else None
        minima = screen.minima(histogram, self._each)
        limits = torch.empty(len(minima), dtype=torch.float64, device=minima.device)
        open_ = torch.empty(minima.shape, dtype=torch.bool, device=minima.device)
        for rows in torch.arange(len(minima), device=minima.device).split(_LOOKED_AT):
            open_[rows], limits[rows] = screen.open_blocks(rows, minima[rows])
        return Screened(screen, minima, histogram, limits, open_)

    @cached_property
    def screen(self) -> Screen:
        """A screen in the fastest arithmetic that leaves little open on a sample of the rows."""
        x, others = self.rows.distinct, None if self.one_set else self.columns.distinct
        if self._arithmetic is not None:
            return Screen(x, others, ARITHMETICS[self._arithmetic], self._tile)
        ladder = by_device(LADDERS, x.device)
        for arithmetic in ladder[:-1]:
            screen = Screen(x, others, arithmetic, self._tile)
            sample = torch.arange(0, len(x), max(1, len(x) // _SAMPLE), device=x.device)
            left, _ = screen.open_blocks(sample, screen.sample_minima(sample))
            if float(left.double().mean()) <= max(_TOO_MANY, 4 / left.shape[1]):
                return screen
        return Screen(x, others, ladder[-1], self._tile)

    def _certified(self, open_: Bool[Tensor, "row block"], limits: Float[Tensor, " row"]) -> Iterator[Pairs]:
        """Every pair the screen leaves open, with its distance, by places among the distinct rows."""
        rows, columns = self.rows.distinct, self.columns.distinct
        size = by_device(_CERTIFIED, rows.device)
        for firsts, seconds in self.screened.screen.candidates(open_.T.nonzero(), limits):
            for i, j in zip(firsts.split(size), seconds.split(size), strict=True):
                yield i, j, row_distances(rows[i], columns[j])

    def _named(self, places: Iterator[Pairs]) -> Iterator[Pairs]:
        for i, j, away in places:
            yield self.rows.firsts[i], self.columns.firsts[j], away
