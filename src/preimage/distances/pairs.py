"""Certified nearest neighbours and closest pairs: screened by products, decided by float64 differences.

What is reported does not depend on tiles, their order, the arithmetic of the screen or the device: every
pair the screen cannot exclude is recomputed from the original rows by a distance that is a function of the
two rows alone, and ties go to the lower index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from preimage.distances.arithmetic import ARITHMETICS, LADDERS
from preimage.distances.closest import Closest
from preimage.distances.direct import row_distances
from preimage.distances.histogram import Histogram, Spread, counted
from preimage.distances.rows import RowSet, as_rows
from preimage.distances.screen import EachTile, Screen, here
from preimage.errors import OptionError

_CERTIFIED = {"cpu": 2**10, "cuda": 2**17}  # pairs recomputed at once
_LOOKED_AT = 2**14  # rows whose minima are looked at together
_SAMPLE = 128  # rows that tell whether an arithmetic serves
_PROMISING, _NEAR = 4, 8  # blocks of each row that are looked at for near rows, and how many are found
_TOO_MANY = 0.02  # share of all blocks a screen may leave open before a finer one is used


class Pair(NamedTuple):
    """Two rows and their distance; first < second within one set."""

    first: int
    second: int
    distance: float


class Nearest(NamedTuple):
    """For every row the nearest other row, the lower index where several are as near."""

    indices: Int[Tensor, " row"]
    distances: Float[Tensor, " row"]


class _Screened(NamedTuple):
    """A finished screen, its minima, and what they leave open for nearest neighbours."""

    screen: Screen
    minima: Float[Tensor, "row block"]
    histogram: Histogram | None
    limits: Float[Tensor, " row"]
    open: Bool[Tensor, "row block"]


class PairScan:
    """Everything about the pairs within one set of rows, or between two; equal rows are looked at once.

    ``arithmetic`` names the screen's, None chooses by the data; ``each`` runs the tiles, here or elsewhere,
    or finds what was kept of them; ``spread`` counts all distances on the way, which :attr:`spread` would
    otherwise do in a pass of its own.
    """

    def __init__(
        self,
        vectors: Shaped[Tensor, "row d"],
        others: Shaped[Tensor, "column d"] | None = None,
        *,
        arithmetic: str | None = None,
        tile: int | None = None,
        each: EachTile = here,
        spread: bool = False,
    ) -> None:
        self._rows = RowSet(vectors)
        self._within = others is None
        self._columns = self._rows if others is None else RowSet(others)
        count, against = len(vectors), len(self._columns.x)
        self.pairs = count * (count - 1) // 2 if self._within else count * against
        if self.pairs == 0:
            given = f"{count} rows make" if self._within else f"{count} and {against} rows make"
            raise OptionError(f"{given} no pair.", "Give at least two, or one on each side.")
        if self._rows.x.shape[1] != self._columns.x.shape[1]:
            raise OptionError(
                f"Rows of {vectors.shape[1]} and {self._columns.x.shape[1]} numbers have no distance.",
                "Give two sets of the same width.",
            )
        self._arithmetic, self._tile, self._each, self._counting = arithmetic, tile, each, spread

    @property
    def same(self) -> Int[Tensor, " row"]:
        """For each row the first row that equals it to the bit."""
        return self._rows.same

    @property
    def distinct(self) -> int:
        """Rows that differ from one another."""
        return len(self._rows.kept)

    @property
    def firsts(self) -> Int[Tensor, " kept"]:
        """The first of every group of rows that are the same, alone or not."""
        return self._rows.kept

    @property
    def arithmetic(self) -> str:
        """The arithmetic the screen ran in; exact where nothing was left to screen."""
        return self._screened.screen.arithmetic.name if self._any else "exact"

    @cached_property
    def nearest(self) -> Nearest:
        """The nearest other row of every row; at distance 0 where it has a twin."""
        rows = self._rows
        indices = torch.zeros(len(rows.x), dtype=torch.long, device=rows.x.device)
        distances = torch.zeros(len(rows.x), dtype=torch.float64, device=rows.x.device)
        if self._any:
            among, away = self._nearest_distinct
            indices[rows.kept], distances[rows.kept] = self._columns.kept[among], away
        if not self._within:
            return Nearest(indices[rows.same], distances[rows.same])
        twins = rows.twins
        indices[twins], distances[twins] = rows.same[twins], 0.0
        second = torch.full_like(indices, len(rows.x))
        second.scatter_reduce_(0, rows.same[twins], twins, "amin")
        has = second < len(rows.x)
        indices[has], distances[has] = second[has], 0.0
        return Nearest(indices, distances)

    def closest(self, k: int = 1, *, twins: bool = True) -> list[Pair]:
        """The k closest pairs, nearest first; fewer where there are fewer.

        Without ``twins`` equal rows count as one, named by the first of them.
        """
        if k < 1:
            raise OptionError(f"k is {k}.", "Give at least 1.")
        found = self._rows.twin_pairs(k) if self._within and twins else []
        pairs = [Pair(first, second, 0.0) for first, second in found]
        if len(pairs) < k and self._any:
            pairs += self._apart(k - len(pairs), twins)
        return pairs[:k]

    def groups(self) -> list[list[int]]:
        """The rows that are the same to the bit, group by group."""
        return self._rows.groups()

    def group_of(self, row: int) -> list[int]:
        """All rows that are the same as the first of a group."""
        return self._rows.group(row)

    def count_below(self, thresholds: Sequence[float]) -> list[int]:
        """How many pairs are nearer than each threshold."""
        sizes, others = self._rows.sizes, self._columns.sizes
        twins = int((sizes * (sizes - 1) // 2).sum()) if self._within else 0
        counts = [twins if threshold > 0 else 0 for threshold in thresholds]
        if self._any and max(thresholds, default=0.0) > 0:
            for i, j, away in self._near(max(thresholds)):
                weight = sizes[i] * others[j]
                for number, threshold in enumerate(thresholds):
                    counts[number] += int(weight[away < threshold].sum())
        return counts

    def within(self, reach: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pairs of rows that differ, no farther apart than ``reach``: firsts, seconds, distances.

        Of rows that are the same only the first is named.
        """
        if self._any:
            for i, j, away in self._near(reach, inclusive=True):
                yield self._rows.kept[i], self._columns.kept[j], away

    def within_each(self, reach: Float[Tensor, " row"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For every row the others that differ from it, no farther away than the row's own reach.

        Of rows that are the same only the first is named, with its own reach.
        """
        if self._any:
            for i, j, away in self._near(reach[self._rows.kept], inclusive=True, ordered=False):
                yield self._rows.kept[i], self._columns.kept[j], away

    def upper_bounds(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some column"]:
        """Distances that a few rows certainly do not exceed, to the first of every group of columns.

        Rows are given by their place among those that differ; infinite to themselves.
        """
        screen = self._screened.screen
        values = screen.row_values(rows)[:, : screen.columns.count].double()
        return screen.at_most(
            rows, values.add_(screen.bound(rows, screen.columns.norms[: screen.columns.count]))
        )

    def near_some(self) -> tuple[Int[Tensor, "kept some"], Float[Tensor, "kept some"]]:
        """For every row that differs from those before it at least eight others that are near, and bounds.

        They are the nearest of every piece of its most promising blocks, as far as the screen can tell, with
        a distance to each that is certainly not exceeded; infinite where a piece has no other row.
        """
        screen, minima = self._screened.screen, self._screened.minima[: self.distinct]
        blocks = min(_PROMISING, minima.shape[1])
        chosen = minima.topk(blocks, dim=1, largest=False).indices.flatten()
        rows = torch.arange(self.distinct, device=chosen.device).repeat_interleave(blocks)
        order = chosen.argsort(stable=True)
        pieces = 2 ** math.ceil(math.log2(_NEAR / blocks))  # of each block
        columns, highest = screen.block_nearest(torch.stack([chosen[order], rows[order]], dim=1), pieces)
        found, away = torch.empty_like(columns), torch.empty_like(highest)
        found[order] = self._columns.kept[columns.clamp_max(screen.columns.count - 1)]
        away[order] = highest
        return found.view(self.distinct, -1), away.view(self.distinct, -1)

    @cached_property
    def spread(self) -> Spread:
        """How the distances of all pairs are distributed."""
        histogram = Histogram(self._rows.x.device)
        if not self._any:
            histogram.same = self.pairs
            return Spread(histogram)
        screen, counted = self._screened.screen, self._screened.histogram
        if counted is None:
            screen.minima(histogram)
        else:
            histogram.counts += counted.counts
        self._count_twins(screen, histogram)
        longest = screen.rows.norms.argmax()[None]
        error = float(screen.bound(longest, screen.columns.norms.max()[None]))
        relative = screen.eta + screen.cushion - 1
        return Spread(histogram, error, float(screen.slack.max()), screen.scale, relative)

    def _count_twins(self, screen: Screen, histogram: Histogram) -> None:
        """Add the pairs of rows that were looked at once for several.

        Of s_i rows and t_j columns that are the same one pair was counted, s_i t_j are there: with e = s - 1
        and f = t - 1 what is missing is e_i (1 + f_j) + f_j, and within one set e_i + e_j + e_i e_j once.
        """
        more, others = self._rows.sizes - 1, self._columns.sizes - 1
        for rows in more.nonzero().flatten().split(_SAMPLE):
            both = others.expand(len(rows), -1)
            if self._within:
                both = both * (torch.arange(len(others), device=rows.device) > rows[:, None])
            values = screen.row_values(rows)[:, : len(others)]
            histogram.counts += counted(values, weights=more[rows][:, None] * (1 + both))
        if self._within:
            histogram.same += int((more * (more + 1) // 2).sum())
            return
        turned = screen.turned()
        for rows in others.nonzero().flatten().split(_SAMPLE):
            values = turned.row_values(rows)[:, : len(more)]
            histogram.counts += counted(values, weights=others[rows][:, None].expand_as(values))

    # Rows that differ.

    @property
    def _any(self) -> bool:
        """Whether there are pairs of rows that are not known to be the same."""
        return self.distinct > 1 or not self._within

    def _screen(self) -> Screen:
        """A screen in the fastest arithmetic that leaves little open on a sample of the rows."""
        x, others = self._rows.first, None if self._within else self._columns.first
        ladder = LADDERS.get(x.device.type, LADDERS["cpu"])
        if self._arithmetic is not None:
            return Screen(x, others, ARITHMETICS[self._arithmetic], self._tile)
        for arithmetic in ladder[:-1]:
            screen = Screen(x, others, arithmetic, self._tile)
            sample = torch.arange(0, len(x), max(1, len(x) // _SAMPLE), device=x.device)
            minima = screen.sample_minima(sample)
            left, _ = screen.open_blocks(sample, minima)
            if float(left.double().mean()) <= max(_TOO_MANY, 4 / left.shape[1]):
                return screen
        return Screen(x, others, ladder[-1], self._tile)

    @cached_property
    def _screened(self) -> _Screened:
        screen = self._screen()
        histogram = Histogram(self._rows.x.device) if self._counting else None
        minima = screen.minima(histogram, self._each)
        limits = torch.empty(len(minima), dtype=torch.float64, device=minima.device)
        open_ = torch.empty(minima.shape, dtype=torch.bool, device=minima.device)
        for rows in torch.arange(len(minima), device=minima.device).split(_LOOKED_AT):
            open_[rows], limits[rows] = screen.open_blocks(rows, minima[rows])
        return _Screened(screen, minima, histogram, limits, open_)

    @cached_property
    def _nearest_distinct(self) -> tuple[Tensor, Tensor]:
        screened, none = self._screened, len(self._columns.kept)
        best = torch.full((self.distinct,), torch.inf, dtype=torch.float64, device=self._rows.x.device)
        index = torch.full((self.distinct,), none, device=best.device)
        for i, j, away in self._certified(screened.screen, screened.open, screened.limits):
            before = best.clone()
            best.scatter_reduce_(0, i, away, "amin")
            index[best < before] = none
            tied = away == best[i]
            index.scatter_reduce_(0, i[tied], j[tied], "amin")
        return index, best

    def _apart(self, wanted: int, twins: bool) -> list[Pair]:
        """The closest pairs of rows that differ, each with all twins of its two rows if wanted.

        A row's nearest other is a pair that is there: the best of those say how far to look, and they stay
        whatever the screen finds, so that there are never fewer than asked for and there.
        """
        among, away = self._nearest_distinct
        order = torch.arange(self.distinct, device=among.device)
        first, second = (order.minimum(among), order.maximum(among)) if self._within else (order, among)
        closest = Closest(wanted, len(self._columns.kept))
        closest.add(first, second, away)
        known = closest.distances
        reach = float(known[-1]) if len(known) == wanted else math.inf
        for i, j, distance in self._open(torch.full_like(away, reach)):
            ordered = i < j if self._within else slice(None)
            closest.add(i[ordered], j[ordered], distance[ordered])
        pairs: list[Pair] = []
        for apart, tied in groupby(closest.ranked(), key=lambda pair: pair[2]):
            if len(pairs) >= wanted:
                break
            named = [spelled for i, j, _ in tied for spelled in self._spelled(i, j, wanted if twins else 1)]
            pairs += [Pair(first, second, apart) for first, second in sorted(named)]
        return pairs

    def _spelled(self, i: int, j: int, most: int) -> Iterator[tuple[int, int]]:
        """Two distinct rows with their twins, so many of each: the first twins make the first pairs."""
        left, right = int(self._rows.kept[i]), int(self._columns.kept[j])
        for a in self._rows.group(left)[:most]:
            for b in self._columns.group(right)[:most]:
                yield (min(a, b), max(a, b)) if self._within else (a, b)

    def _near(
        self, reach: Float[Tensor, " kept"] | float, inclusive: bool = False, ordered: bool = True
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pairs of distinct rows nearer than ``reach``, or than the row's own, with their distances.

        Within one set i < j, unless they are not to be ordered: then each is looked at from both ends.
        """
        own = torch.zeros(self.distinct, dtype=torch.float64, device=self._rows.x.device)
        own[:] = reach
        for i, j, away in self._open(own):
            near = (away <= own[i]) if inclusive else (away < own[i])
            if self._within and ordered:
                near &= i < j
            if bool(near.any()):
                yield i[near], j[near], away[near]

    def _open(self, reach: Float[Tensor, " kept"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Every pair the screen cannot place beyond its row's reach, with its distance."""
        screen, minima = self._screened.screen, self._screened.minima
        every = torch.arange(len(minima), device=minima.device)
        own = torch.zeros(len(minima), dtype=torch.float64, device=minima.device)
        own[: self.distinct] = reach
        limits = screen.limits(every, own)
        parts = every.split(_LOOKED_AT)
        open_ = torch.cat([screen.open_blocks(rows, minima[rows], limits[rows])[0] for rows in parts])
        return self._certified(screen, open_, limits)

    def _certified(
        self, screen: Screen, open_: Bool[Tensor, "row block"], limits: Float[Tensor, " row"]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Every pair the screen leaves open, with its distance."""
        rows, columns = self._rows.first, self._columns.first
        size = _CERTIFIED.get(rows.device.type, _CERTIFIED["cpu"])
        for firsts, seconds in screen.candidates(open_.T.nonzero(), limits):
            for i, j in zip(firsts.split(size), seconds.split(size), strict=True):
                yield i, j, row_distances(rows[i], columns[j])


Rows = Tensor | np.ndarray | Sequence[Any]


def closest_pairs(vectors: Rows, k: int = 10, *, others: Rows | None = None) -> list[Pair]:
    """The k closest pairs of rows: (i, j, distance), nearest first, certified in float64.

    With ``others`` i is a row of ``vectors`` and j one of ``others``. There are always k pairs, or all there
    are; equally close ones come in the order of i, then of j. Integers up to 2^53 and booleans count as
    numbers; coordinates beyond 1e150, NaN, infinity and complex numbers are refused.
    """
    return PairScan(as_rows(vectors), None if others is None else as_rows(others)).closest(k)


def nearest_neighbours(vectors: Rows, *, others: Rows | None = None) -> Nearest:
    """The nearest other row of every row, or the nearest of ``others``, certified in float64."""
    return PairScan(as_rows(vectors), None if others is None else as_rows(others)).nearest


nearest_neighbors = nearest_neighbours  # as scikit-learn and most of the field spell it
