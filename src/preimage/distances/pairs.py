"""Certified nearest neighbours and closest pairs: screened by products, decided by float64 differences.

What is reported does not depend on tiles, their order or the arithmetic of the screen: every pair the screen
cannot exclude is recomputed from the original rows, and ties go to the lower index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.distances.direct import row_distances
from preimage.distances.rows import require_finite, same_rows
from preimage.distances.screen import BLOCK, Histogram, Screen
from preimage.errors import OptionError

_CERTIFIED = 2**16  # pairs recomputed at once
_TOO_MANY = 0.1  # share of all blocks the screen may leave open before a finer one is used


class Pair(NamedTuple):
    """Two rows and their distance; first < second."""

    first: int
    second: int
    distance: float


class Nearest(NamedTuple):
    """For every row the nearest other row, the lower index where several are as near."""

    indices: Int[Tensor, " row"]
    distances: Float[Tensor, " row"]


class Quantile(NamedTuple):
    """A quantile of all distances: between ``low`` and ``high``, both proven; ``value`` is in the middle."""

    value: float
    low: float
    high: float


class Spread:
    """The distances of all pairs, counted in bins of 1/4096 of a distance."""

    def __init__(self, histogram: Histogram, screen: Screen) -> None:
        self._histogram = histogram
        self._cumulative = histogram.finite.cumsum(0)
        self._error = float(screen.bound(screen.rows.norms.argmax()[None], screen.rows.norms.max()[None]))
        self._slack, self._scale = float(screen.slack.max()), screen.scale

    @property
    def pairs(self) -> int:
        """Pairs counted."""
        return int(self._cumulative[-1])

    def quantile(self, q: float) -> Quantile:
        """The distance that a share ``q`` of all pairs does not exceed."""
        rank = min(max(1, math.ceil(q * self.pairs)), self.pairs)
        low, high = self._histogram.edges(int(torch.searchsorted(self._cumulative, rank)))
        lowest = max(0.0, max(0.0, low - self._error) ** 0.5 - self._slack) / self._scale
        highest = ((high + self._error) ** 0.5 + self._slack) / self._scale
        return Quantile(((low + high) / 2) ** 0.5 / self._scale, lowest, highest)


class PairScan:
    """Everything about the pairs within one set of rows; rows that are the same to the bit count as one."""

    def __init__(
        self,
        vectors: Float[Tensor, "row d"],
        *,
        dtype: torch.dtype | None = None,
        tile: int | None = None,
    ) -> None:
        if len(vectors) < 2:
            raise OptionError(f"{len(vectors)} rows make no pair.", "Give at least two.")
        require_finite(vectors)
        self._x = vectors
        self._dtype, self._tile = dtype, tile
        self.same = same_rows(vectors)
        self.pairs = len(vectors) * (len(vectors) - 1) // 2
        self._kept = (self.same == torch.arange(len(vectors), device=vectors.device)).nonzero().flatten()
        self._rows = vectors if len(self._kept) == len(vectors) else vectors[self._kept]

    @property
    def distinct(self) -> int:
        """Rows that differ from one another."""
        return len(self._kept)

    @cached_property
    def nearest(self) -> Nearest:
        """The nearest other row of every row; at distance 0 where it has a twin."""
        count = len(self._x)
        indices = torch.zeros(count, dtype=torch.long, device=self._x.device)
        distances = torch.zeros(count, dtype=torch.float64, device=self._x.device)
        if self.distinct > 1:
            among, away = self._nearest_distinct
            indices[self._kept], distances[self._kept] = self._kept[among], away
        order = torch.arange(count, device=self._x.device)
        twins = (self.same != order).nonzero().flatten()
        indices[twins], distances[twins] = self.same[twins], 0.0
        second = torch.full((count,), count, device=self._x.device)
        second.scatter_reduce_(0, self.same[twins], twins, "amin")
        has = second < count
        indices[has], distances[has] = second[has], 0.0
        return Nearest(indices, distances)

    def closest(self, k: int = 1) -> list[Pair]:
        """The k closest pairs, nearest first; fewer where there are fewer."""
        if k < 1:
            raise OptionError(f"k is {k}.", "Give at least 1.")
        found = self._twin_pairs(k)
        if len(found) < k and self.distinct > 1:
            found += self._apart(k - len(found), k)
        return found[:k]

    def count_below(self, thresholds: Sequence[float]) -> list[int]:
        """How many pairs are nearer than each threshold."""
        sizes = self.same.bincount(minlength=len(self._x))[self._kept]
        twins = int((sizes * (sizes - 1) // 2).sum())
        counts = [twins if threshold > 0 else 0 for threshold in thresholds]
        if self.distinct > 1 and max(thresholds, default=0.0) > 0:
            for i, j, away in self._within(max(thresholds)):
                weight = sizes[i] * sizes[j]
                for number, threshold in enumerate(thresholds):
                    counts[number] += int(weight[away < threshold].sum())
        return counts

    @cached_property
    def spread(self) -> Spread:
        """How the distances of all pairs are distributed."""
        screen = Screen(self._x, dtype=self._dtype or torch.float32, tile=self._tile)
        histogram = Histogram(self._x.device)
        screen.minima(histogram)
        return Spread(histogram, screen)

    # Rows that differ.

    @cached_property
    def _screened(self) -> tuple[Screen, Tensor, Tensor, Tensor]:
        """A screen, its minima, and for each row a squared limit its nearest neighbour cannot exceed."""
        for dtype in (self._dtype,) if self._dtype else (torch.float32, torch.float64):
            screen = Screen(self._rows, dtype=dtype, tile=self._tile)
            minima = screen.minima()
            every = torch.arange(len(minima), device=minima.device)
            error = screen.bound(every, screen.columns.block_norms)
            highest = (minima.double() + error).amin(dim=1).clamp_min(0)
            limits = ((highest.sqrt() + screen.slack).square()) * (1 + 1e-12)
            limits[screen.rows.count :] = -torch.inf
            open_ = minima.double() - error <= limits[:, None]
            if float(open_.double().mean()) <= max(_TOO_MANY, 4 / open_.shape[1]):
                break
        return screen, minima, limits, open_

    @cached_property
    def _nearest_distinct(self) -> tuple[Tensor, Tensor]:
        screen, _, limits, open_ = self._screened
        best = torch.full((self.distinct,), torch.inf, dtype=torch.float64, device=self._x.device)
        index = torch.full((self.distinct,), self.distinct, device=self._x.device)
        for i, j, away in self._certified(screen, open_, limits):
            before = best.clone()
            best.scatter_reduce_(0, i, away, "amin")
            index[best < before] = self.distinct
            tied = away == best[i]
            index.scatter_reduce_(0, i[tied], j[tied], "amin")
        return index, best

    def _apart(self, wanted: int, k: int) -> list[Pair]:
        """The closest pairs of rows that differ, each with all twins of its two rows."""
        among, away = self._nearest_distinct
        order = torch.arange(self.distinct, device=among.device)
        once = (among[among] != order) | (order < among)  # a mutual pair counts once
        known = away[once].sort().values
        reach = float(known[min(wanted, len(known)) - 1]) if len(known) >= wanted else torch.inf
        found: list[Pair] = []
        for i, j, distance in self._within(reach, inclusive=True):
            found += [Pair(*p) for p in zip(i.tolist(), j.tolist(), distance.tolist(), strict=True)]
            if len(found) > 64 * k + 2**20:
                found = sorted(found, key=lambda p: (p.distance, p.first, p.second))[:wanted]
        found.sort(key=lambda p: (p.distance, p.first, p.second))
        return self._expanded(found[:wanted])

    def _within(self, reach: float, inclusive: bool = False) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Pairs i < j of distinct rows nearer than ``reach``, with their distances."""
        screen, minima, _, _ = self._screened
        limit = torch.full((len(minima),), reach * screen.scale, dtype=torch.float64, device=minima.device)
        limits = (limit + screen.slack).square() * (1 + 1e-12)
        limits[screen.rows.count :] = -torch.inf
        every = torch.arange(len(minima), device=minima.device)
        error = screen.bound(every, screen.columns.block_norms)
        open_ = minima.double() - error <= limits[:, None]
        for i, j, away in self._certified(screen, open_, limits):
            near = (i < j) & ((away <= reach) if inclusive else (away < reach))
            if bool(near.any()):
                yield i[near], j[near], away[near]

    def _certified(
        self, screen: Screen, open_: Bool[Tensor, "row block"], limits: Float[Tensor, " row"]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Every pair the screen leaves open, with its float64 distance."""
        for block in open_.any(dim=0).nonzero().flatten().tolist():
            for rows in open_[:, block].nonzero().flatten().split(_CERTIFIED // BLOCK):
                values = screen.block_values(rows, block)
                kept = screen.keeps(values, rows, block, limits[rows]).nonzero()
                i, j = rows[kept[:, 0]], kept[:, 1] + block * BLOCK
                for some in torch.arange(len(i), device=i.device).split(_CERTIFIED):
                    yield i[some], j[some], row_distances(self._rows[i[some]], self._rows[j[some]])

    # Rows that are the same.

    def _twin_pairs(self, k: int) -> list[Pair]:
        found: list[Pair] = []
        for group in self._groups(set(self.same[self._twins()].tolist())):
            for position, first in enumerate(group):
                found += [Pair(first, second, 0.0) for second in group[position + 1 :]]
                if len(found) >= k:
                    break
        found.sort()
        return found[:k]

    def _twins(self) -> Tensor:
        return (self.same != torch.arange(len(self.same), device=self.same.device)).nonzero().flatten()

    def _groups(self, firsts: set[int]) -> list[list[int]]:
        """The rows that are the same as each of these first ones."""
        groups: dict[int, list[int]] = {first: [first] for first in sorted(firsts)}
        for twin in self._twins().tolist():
            first = int(self.same[twin])
            if first in groups:
                groups[first].append(twin)
        return list(groups.values())

    def _expanded(self, pairs: list[Pair]) -> list[Pair]:
        """Pairs of distinct rows as pairs of all rows."""
        found: list[Pair] = []
        for pair in pairs:
            one, other = (self._groups({int(self._kept[end])})[0] for end in (pair.first, pair.second))
            found += [Pair(min(a, b), max(a, b), pair.distance) for a in one for b in other]
        found.sort(key=lambda p: (p.distance, p.first, p.second))
        return found


def closest_pairs(vectors: Tensor | np.ndarray, k: int = 10) -> list[Pair]:
    """The k closest pairs of rows: (i, j, distance), nearest first, certified in float64."""
    return PairScan(_rows(vectors)).closest(k)


def nearest_neighbors(vectors: Tensor | np.ndarray) -> Nearest:
    """The nearest other row of every row and its distance, certified in float64."""
    return PairScan(_rows(vectors)).nearest


def _rows(vectors: Tensor | np.ndarray) -> Tensor:
    rows = torch.as_tensor(vectors)
    if rows.ndim != 2:
        raise OptionError(f"These vectors have {rows.ndim} axes.", "Give rows x width.")
    return rows if rows.is_floating_point() else rows.double()
