"""The screen: squared distances of all pairs by matrix products, each with a proven bound of its error.

Rows are centred in float64, scaled by a power of two and rounded to the arithmetic of the screen. With
a_i = |y_i|, the product of [-2 y_i, a_i^2, 1] and [y_j, 1, a_j^2] is |y_i - y_j|^2. Floating-point sums of
n = d + 2 products, in any order, are off by at most gamma_n = n u / (1 - n u) times the sum of the absolute
products (u: unit roundoff), here at most (a_i + a_j)^2; another 4 u cover the rounding of the squares. What
rounding a row changes is measured, row by row. So a pair is dropped only where the bound excludes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 256  # columns whose smallest screened value is kept for every row
_TILE = {"cpu": 2048, "cuda": 16384}  # rows and columns of one product; a multiple of BLOCK
_PREPARED = 4096  # rows prepared at once


class Side:
    """One set of rows as the screen sees it, filled up to whole blocks."""

    def __init__(self, x: Float[Tensor, "row d"], centre: Centre, dtype: torch.dtype) -> None:
        self.count, d = x.shape
        padded = max(1, -(-len(x) // BLOCK)) * BLOCK
        self.left = torch.zeros(padded, d + 2, dtype=dtype, device=x.device)
        self.right = torch.zeros_like(self.left)
        self.norms = torch.zeros(padded, dtype=torch.float64, device=x.device)
        self.rounding = torch.zeros_like(self.norms)
        for start in range(0, len(x), _PREPARED):
            part = slice(start, min(start + _PREPARED, len(x)))
            exact = (x[part].double() - centre.mean) * centre.scale
            rounded = exact.to(dtype)
            squares = rounded.double().square().sum(dim=1)
            self.norms[part] = squares.sqrt()
            rounding = (exact - rounded.double()).square().sum(dim=1).sqrt()
            self.rounding[part] = rounding + torch.finfo(torch.float64).eps * self.norms[part]
            self.left[part, :d], self.left[part, d] = -2 * rounded, squares.to(dtype)
            self.right[part, :d], self.right[part, d + 1] = rounded, squares.to(dtype)
        self.left[:, d + 1] = 1
        self.right[:, d] = 1
        self.blocks = padded // BLOCK
        self.block_norms = self.norms.view(-1, BLOCK).amax(dim=1)


class Centre(NamedTuple):
    """What is taken off every row, and the power of two that brings the longest to about 1."""

    mean: Float[Tensor, " d"]
    scale: float

    @classmethod
    def of(cls, *sets: Float[Tensor, "_ d"]) -> Centre:
        """The mean of the first set; a scale for all."""
        mean = torch.zeros(sets[0].shape[1], dtype=torch.float64, device=sets[0].device)
        for part in sets[0].split(_PREPARED):
            mean += part.sum(dim=0, dtype=torch.float64) / len(sets[0])
        longest = max(
            (float((part.double() - mean).square().sum(dim=1).max()) ** 0.5)
            for rows in sets
            for part in rows.split(_PREPARED)
        )
        _, exponent = torch.frexp(torch.tensor(max(longest, 1e-300), dtype=torch.float64))
        return cls(mean, 2.0 ** -int(exponent))


class Screen:
    """All pairs within one set of rows, or between two, in one arithmetic."""

    def __init__(
        self,
        x: Float[Tensor, "row d"],
        other: Float[Tensor, "column d"] | None = None,
        dtype: torch.dtype = torch.float32,
        tile: int | None = None,
    ) -> None:
        centre = Centre.of(x) if other is None else Centre.of(x, other)
        self.scale = centre.scale
        self.within = other is None
        self.rows = Side(x, centre, dtype)
        self.columns = self.rows if other is None else Side(other, centre, dtype)
        info, n = torch.finfo(dtype), x.shape[1] + 2
        unit = info.eps / 2
        self._error = n * unit / (1 - n * unit) + 4 * unit
        self._underflow = n * info.tiny
        self.slack = 2 * (self.rows.rounding + self.columns.rounding.max())  # of a distance, for each row
        self._tile = tile or _TILE.get(x.device.type, _TILE["cpu"])

    def bound(self, rows: Tensor, norms: Tensor) -> Float[Tensor, "some other"]:
        """The largest error of screened values of rows against columns of these norms."""
        reach = self.rows.norms[rows][:, None] + norms[None, :]
        return self._error * reach.square() + self._underflow

    def minima(self, histogram: Histogram | None = None) -> Float[Tensor, "row block"]:
        """For each row the smallest screened value in each block of columns, itself left out.

        With ``histogram`` every pair is counted there on the way.
        """
        found = self.rows.left.new_full((len(self.rows.left), self.columns.blocks), torch.inf)
        for a, b, values in self._tiles():
            across, down = (slice(part.start // BLOCK, part.stop // BLOCK) for part in (b, a))
            found[a, across] = values.view(len(values), -1, BLOCK).amin(dim=2)
            if self.within and a != b:
                found[b, down] = values.view(-1, BLOCK, values.shape[1]).amin(dim=1).T
            if histogram is not None:
                histogram.add(values, upper=self.within and a == b)
        return found

    def block_values(self, rows: Int[Tensor, " some"], block: int) -> Float[Tensor, "some column"]:
        """Screened values of some rows against one block, invalid pairs infinite."""
        start = block * BLOCK
        stop = min(start + BLOCK, self.columns.count)
        with exact_products():
            values = self.rows.left[rows] @ self.columns.right[start:stop].T
        if self.within:
            values[rows[:, None] == torch.arange(start, stop, device=rows.device)] = torch.inf
        return values

    def keeps(
        self, values: Tensor, rows: Int[Tensor, " some"], block: int, limits: Float[Tensor, " some"]
    ) -> Bool[Tensor, "some column"]:
        """Which of a block's pairs may be within a squared limit."""
        start = block * BLOCK
        error = self.bound(rows, self.columns.norms[start : start + values.shape[1]])
        return values.double() - error <= limits[:, None]

    def _tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Ranges of rows and columns and their screened values, what is no pair infinite.

        Within one set only tiles on and above the diagonal. The values are overwritten by the next tile's.
        """
        rows, columns, tile = self.rows, self.columns, self._tile
        buffer = rows.left.new_empty(min(tile, len(rows.left)) * min(tile, len(columns.left)))
        for a in _ranges(len(rows.left), tile):
            for b in _ranges(len(columns.left), tile):
                if self.within and b.start < a.start:
                    continue
                left, right = rows.left[a], columns.right[b]
                values = buffer[: len(left) * len(right)].view(len(left), len(right))
                with exact_products():
                    torch.mm(left, right.T, out=values)
                if b.stop > columns.count:
                    values[:, columns.count - b.start :] = torch.inf
                if a.stop > rows.count:
                    values[rows.count - a.start :] = torch.inf
                if self.within and a == b:
                    values.fill_diagonal_(torch.inf)
                yield a, b, values


class Histogram:
    """Counts of squared values by the leading bits of their float32: bins of 1/2048 of a value.

    Bits of positive floats are in the order of the floats, so that binning is a shift.
    """

    _SHIFT = 12

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2 ** (31 - self._SHIFT), dtype=torch.int64, device=device)

    def add(self, values: Float[Tensor, "row column"], upper: bool) -> None:
        """Count finite values: all, or those above the diagonal."""
        bits = values.float().clamp_min(0.0).view(torch.int32)
        if upper:
            mask = torch.ones_like(values, dtype=torch.bool).triu(1)
            bits = bits[mask]
        keys = (bits.flatten() >> self._SHIFT).long()
        self.counts += torch.bincount(keys, minlength=len(self.counts))

    def edges(self, index: int) -> tuple[float, float]:
        """The smallest and the largest value of a bin."""
        low, high = ((index << self._SHIFT), ((index + 1) << self._SHIFT) - 1)
        ends = torch.tensor([low, high], dtype=torch.int32).view(torch.float32)
        return float(ends[0]), float(ends[1])

    @property
    def finite(self) -> Int[Tensor, " bin"]:
        """Counts without the bin of what is no pair."""
        return self.counts[: 0x7F800000 >> self._SHIFT]


def bare_products(x: Float[Tensor, "row d"], dtype: torch.dtype = torch.float32) -> None:
    """The products a screen makes, and nothing else: what certified distances are measured against."""
    tile = _TILE.get(x.device.type, _TILE["cpu"])
    rows = x.to(dtype)
    buffer = rows.new_empty(min(tile, len(rows)) ** 2)
    with exact_products():
        for a in _ranges(len(rows), tile):
            for b in _ranges(len(rows), tile):
                if b.start >= a.start:
                    left, right = rows[a], rows[b]
                    torch.mm(left, right.T, out=buffer[: len(left) * len(right)].view(len(left), len(right)))


def _ranges(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


@contextmanager
def exact_products() -> Iterator[None]:
    """Full float32 products, whatever the user allowed elsewhere; put back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
