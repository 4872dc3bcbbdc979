"""What is asked of a certified scan: closest pairs, counts under thresholds, how distances are distributed.

The distinct rows of a scan stand for all: every question adds what the rows equal to them say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances.histogram import DistanceDistribution, Histogram, bin_counts
from preimage.distances.rows import as_rows, count_equal_pairs
from preimage.distances.scan import Nearest, PairScan
from preimage.distances.screen import Screen
from preimage.errors import OptionError

_WAITING = 2**16  # pairs that gather before the best are taken
_COUNTED = 128  # rows whose equal rows are counted together
_PROMISING, _NEAR = 4, 8  # blocks of each row that are looked at for near rows, and how many rows are wanted


class Pair(NamedTuple):
    """Two rows and their distance; first < second within one set."""

    first: int
    second: int
    distance: float


def find_closest(scan: PairScan, k: int = 1, *, equal: bool = True) -> list[Pair]:
    """The k closest pairs, nearest first; fewer where there are fewer.

    Without ``equal``, rows that are equal count as one, named by the first of them.
    """
    if k < 1:
        raise OptionError(f"k is {k}.", "Give at least 1.")
    named = scan.rows.equal_pairs(k) if scan.one_set and equal else []
    pairs = [Pair(first, second, 0.0) for first, second in named]
    if len(pairs) < k and scan.any_distinct:
        pairs += _closest_distinct(scan, k - len(pairs), equal)
    return pairs[:k]


def _closest_distinct(scan: PairScan, wanted: int, equal: bool) -> list[Pair]:
    """The closest pairs of rows that differ, each with all rows equal to its two if wanted.

    A row's nearest other is a pair that is there: the best of those say how far to look, and they stay
    whatever the screen finds, so that there are never fewer than asked for and there.
    """
    among, away = scan.nearest_distinct
    order = torch.arange(len(among), device=among.device)
    first, second = (order.minimum(among), order.maximum(among)) if scan.one_set else (order, among)
    best = _Closest(wanted, len(scan.columns.firsts))
    best.add(first, second, away)
    known = best.distances
    radius = float(known[-1]) if len(known) == wanted else math.inf
    for i, j, distance in scan.distinct_open(torch.full_like(away, radius)):
        ordered = i < j if scan.one_set else slice(None)
        best.add(i[ordered], j[ordered], distance[ordered])
    pairs: list[Pair] = []
    for apart, tied in groupby(best.ranked(), key=lambda pair: pair[2]):
        if len(pairs) >= wanted:
            break
        named = [rows for i, j, _ in tied for rows in _with_equal_rows(scan, i, j, wanted if equal else 1)]
        pairs += [Pair(first, second, apart) for first, second in sorted(named)]
    return pairs


def _with_equal_rows(scan: PairScan, i: int, j: int, most: int) -> Iterator[tuple[int, int]]:
    """Two distinct rows with those equal to them, so many of each: the first ones make the first pairs."""
    left, right = int(scan.rows.firsts[i]), int(scan.columns.firsts[j])
    for a in scan.rows.group(left)[:most]:
        for b in scan.columns.group(right)[:most]:
            yield (min(a, b), max(a, b)) if scan.one_set else (a, b)


class _Closest:
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

    def _settle(self) -> tuple[Int[Tensor, " some"], Float[Tensor, " some"]]:
        keys, away = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        keys, order = keys.sort(stable=True)
        away, new = away[order], torch.ones_like(keys, dtype=torch.bool)
        new[1:] = keys[1:] != keys[:-1]  # met first: the sort is stable
        keys, away = keys[new], away[new]
        away, order = away.sort(stable=True)
        kept = keys[order][: self._count], away[: self._count]
        self._waiting, self._length = [kept], len(kept[0])
        return kept


def count_below(scan: PairScan, thresholds: Sequence[float]) -> list[int]:
    """How many pairs are nearer than each threshold (in the units of the rows)."""
    equal = count_equal_pairs(scan.rows.same) if scan.one_set else 0
    counts = [equal if threshold > 0 else 0 for threshold in thresholds]
    largest = max(thresholds, default=0.0)
    if largest > 0:
        for i, j, away in scan.distinct_within(largest, inclusive=False):
            weight = scan.rows.sizes[i] * scan.columns.sizes[j]
            for number, threshold in enumerate(thresholds):
                counts[number] += int(weight[away < threshold].sum())
    return counts


def distance_distribution(scan: PairScan) -> DistanceDistribution:
    """How the distances of all pairs are distributed; without ``counting``, in one more pass."""
    histogram = Histogram(scan.rows.x.device)
    if not scan.any_distinct:
        histogram.same = scan.pairs
        return DistanceDistribution(histogram)
    screen, on_the_way = scan.screened.screen, scan.screened.histogram
    if on_the_way is None:
        screen.minima(histogram)
    else:
        histogram.counts += on_the_way.counts
    _count_equal_rows(scan, screen, histogram)
    error = float(screen.value_error(screen.rows.norms.max(), screen.columns.norms.max()))
    relative = screen.eta + screen.cushion - 1
    return DistanceDistribution(histogram, error, float(screen.slack.max()), screen.scale, relative)


def _count_equal_rows(scan: PairScan, screen: Screen, histogram: Histogram) -> None:
    """Add the pairs of rows that were looked at once for several.

    Of s_i equal rows and t_j equal columns one pair was counted, s_i t_j are there: with e = s - 1 and
    f = t - 1 what is missing is e_i (1 + f_j) + f_j, and within one set e_i + e_j + e_i e_j once.
    """
    more, others = scan.rows.sizes - 1, scan.columns.sizes - 1
    for rows in more.nonzero().flatten().split(_COUNTED):
        both = others.expand(len(rows), -1)
        if scan.one_set:
            both = both * (torch.arange(len(others), device=rows.device) > rows[:, None])
        values = screen.row_values(rows)[:, : len(others)]
        histogram.counts += bin_counts(values, weights=more[rows][:, None] * (1 + both))
    if scan.one_set:
        histogram.same += count_equal_pairs(scan.rows.same)
        return
    turned = screen.turned()
    for rows in others.nonzero().flatten().split(_COUNTED):
        values = turned.row_values(rows)[:, : len(more)]
        histogram.counts += bin_counts(values, weights=others[rows][:, None].expand_as(values))


def distance_bounds(scan: PairScan, rows: Int[Tensor, " some"]) -> Float[Tensor, "some distinct"]:
    """Distances that a few rows certainly do not exceed, to every distinct column.

    Rows are given by their place among the distinct ones; infinite to themselves.
    """
    screen = scan.screened.screen
    count = screen.columns.count
    values = screen.row_values(rows)[:, :count].double()
    error = screen.value_error(screen.rows.norms[rows][:, None], screen.columns.norms[:count])
    return screen.distances_at_most(rows, values.add_(error))


def some_near(scan: PairScan) -> tuple[Int[Tensor, "distinct some"], Float[Tensor, "distinct some"]]:
    """For every distinct row at least eight others that are near, and bounds of their distances.

    They are the nearest of every piece of its most promising blocks, as far as the screen can tell, with
    a distance to each that is certainly not exceeded; infinite where a piece has no other row.
    """
    count, screen = len(scan.rows.firsts), scan.screened.screen
    minima = scan.screened.minima[:count]
    blocks = min(_PROMISING, minima.shape[1])
    chosen = minima.topk(blocks, dim=1, largest=False).indices.flatten()
    rows = torch.arange(count, device=chosen.device).repeat_interleave(blocks)
    order = chosen.argsort(stable=True)
    pieces = 2 ** math.ceil(math.log2(_NEAR / blocks))  # of each block
    columns, highest = screen.block_nearest(torch.stack([chosen[order], rows[order]], dim=1), pieces)
    near, bounds = torch.empty_like(columns), torch.empty_like(highest)
    near[order] = scan.columns.firsts[columns.clamp_max(screen.columns.count - 1)]
    bounds[order] = highest
    return near.view(count, -1), bounds.view(count, -1)


Rows = Tensor | np.ndarray | Sequence[Any]


def closest_pairs(vectors: Rows, k: int = 10, *, others: Rows | None = None) -> list[Pair]:
    """The k closest pairs of rows, certified: (first, second, distance), nearest first.

    Every pair is screened by a matrix product with a proven error bound, and what that cannot exclude is
    recomputed by float64 differences, so the answer does not depend on the device or on how the work is
    cut. The cost is about that of the product of the rows with themselves.

    ``vectors``: rows x d; a tensor, an array or nested lists. Booleans and integers up to 2^53 count as
    numbers; coordinates beyond 1e150, NaN, infinity and complex numbers are refused. ``k``: all pairs where
    there are fewer. ``others``: rows x d; pairs are then one row of ``vectors`` and one of ``others``.
    Distances are Euclidean, in the units of the rows; equally close pairs in the order of first, then second.

    >>> closest_pairs([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]], k=2)
    [Pair(first=1, second=2, distance=1.0), Pair(first=0, second=1, distance=5.0)]
    """
    return find_closest(_scan(vectors, others), k)


def nearest_neighbours(vectors: Rows, *, others: Rows | None = None) -> Nearest:
    """The nearest other row of every row, or the nearest of ``others``, certified as in ``closest_pairs``.

    ``vectors``, ``others``: rows x d, as there. ``indices`` and ``distances`` (float64, in the units of the
    rows) are one for each row of ``vectors``; the lower index where several are as near.

    >>> nearest_neighbours([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]).indices.tolist()
    [1, 2, 1]
    """
    return _scan(vectors, others).nearest


nearest_neighbors = nearest_neighbours  # as scikit-learn and most of the field spell it


def _scan(vectors: Rows, others: Rows | None) -> PairScan:
    return PairScan(as_rows(vectors), None if others is None else as_rows(others))
