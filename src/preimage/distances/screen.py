"""The screen: squared distances of all pairs by matrix products, each with a proven bound of its error.

Rows are centred in float64, scaled by a power of two s and rounded to the arithmetic of the screen: y_i, of
length a_i, no farther than rho_i from s (x_i - c), where what rounding changed is measured row by row. The
product of [-2 y_i, a_i^2, 1] and [y_j, 1, a_j^2] is v_ij = |y_i - y_j|^2; a^2 is written in as many numbers
as it takes.

What a screened value says about a reported distance D_ij, and where each part comes from:

* |v_ij - |y_i - y_j|^2| <= E (a_i + a_j)^2 + U (``Screen.value_error``). Floating-point sums of n products,
  in any order, are off by at most gamma_n = n u / (1 - n u) times the sum of the absolute products (u: unit
  of the sums), which is at most (a_i + a_j)^2; 4 u more cover the pieces of the squares, gamma_(n + 8) of
  float64 the squares themselves. U is what underflows.
* | |y_i - y_j| - s |x_i - x_j| | <= rho_i + rho_j <= slack_i, with the largest rho of all columns.
* D_ij is off |x_i - x_j| by at most eta of it (``direct.relative_error``) and the smallest float64.
* Norms and bounds are computed in float64 themselves: a factor 1 + 4 gamma_(n + 8) is more than their norms
  and some forty roundings can lose (``_cushion``: every bound is widened by it).

So a pair is dropped only where these exclude it, and nothing is decided by a comparison of two roundings of
one number.

The work is cut into tiles, each on its own: the unit of resuming and of distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.devices import by_device
from preimage.distances.arithmetic import FLOAT32, FLOAT64, Arithmetic
from preimage.distances.direct import relative_error
from preimage.distances.histogram import Histogram, bin_counts

BLOCK = 256  # columns whose smallest screened value is kept for every row
TILE = {"cpu": 2048, "cuda": 16384}  # rows and columns of one product; a multiple of BLOCK
_PREPARED = {"cpu": 512, "cuda": 16384}  # rows prepared at once, so that they stay in the cache
_DECIDED = {"cpu": 4096, "cuda": 2**17}  # rows of a block looked at again together
_STEEPEST = 1000  # power of two by which the smallest numbers are scaled up
_NOT_ZERO = 1e-300  # divides in place of 0


class Tile(NamedTuple):
    """Ranges of rows and columns whose pairs are screened together."""

    rows: slice
    columns: slice


class TileMinima(NamedTuple):
    """What one tile knows: the smallest screened value of each row in each block of columns, within one set
    also of each column in each block of rows, and how its values are distributed if that is counted."""

    rows: Float[Tensor, "row column_block"]
    columns: Float[Tensor, "column row_block"] | None
    counts: Int[Tensor, " bin"] | None


# Runs tiles, here or elsewhere, or finds what was kept of them; results in the order of the tiles.
EachTile: TypeAlias = Callable[["Screen", Sequence[Tile], bool], Iterable[TileMinima]]


def here(screen: Screen, tiles: Sequence[Tile], counting: bool) -> Iterator[TileMinima]:
    """One tile after another in this process."""
    return (screen.find(tile, counting) for tile in tiles)


class Side:
    """One set of rows as the screen sees it, filled up to whole blocks with rows infinitely far away.

    ``left`` and ``right`` (row x column) are multiplied; ``norms`` are the a_i of the proof, ``block_norms``
    the largest of each block, ``rounding`` the rho_i.
    """

    def __init__(self, x: Float[Tensor, "row d"], centre: Centre, arithmetic: Arithmetic) -> None:
        # The columns the proof rests on, for p pieces of a squared norm; their product is |y_i - y_j|^2:
        #
        #   column   0 .. d-1      d .. d+p-1              d+p .. d+2p-1           up to a multiple of 8
        #   left    -2 y_i         a_i^2, piece by piece   1 .. 1                  0 .. 0
        #   right    y_j           1 .. 1                  a_j^2, piece by piece   0 .. 0
        #   product -2 y_i.y_j   + a_i^2                 + a_j^2                 + 0
        #
        # Rows that only fill up a block are 0 with an infinite first piece: infinitely far from all others.
        self.count, d = x.shape
        padded = max(1, -(-len(x) // BLOCK)) * BLOCK
        width, pieces = arithmetic.width(d), arithmetic.pieces
        self.left = torch.empty(padded, width, dtype=arithmetic.storage, device=x.device)
        self.right = torch.empty_like(self.left)
        self.norms = torch.zeros(padded, dtype=torch.float64, device=x.device)
        self.rounding = torch.zeros_like(self.norms)
        own_pieces, other_pieces = slice(d, d + pieces), slice(d + pieces, d + 2 * pieces)
        for part in _ranges(len(x), by_device(_PREPARED, x.device)):
            exact = (x[part].to(torch.float64) - centre.mean).mul_(centre.scale)
            rounded = arithmetic.rounded(exact)
            kept = rounded.to(torch.float64)
            self.norms[part] = torch.linalg.vector_norm(kept, dim=1)
            squares = self.norms[part].square()
            self.rounding[part] = torch.linalg.vector_norm(exact - kept, dim=1)
            self.left[part, :d], self.right[part, :d] = rounded * -2, rounded
            for piece in range(pieces):
                taken = arithmetic.rounded(squares)
                self.left[part, d + piece] = self.right[part, d + pieces + piece] = taken
                squares = squares - taken.to(torch.float64)
        # the difference to the centre was rounded too, by a unit of |y| and what rounding changed
        self.rounding += 2 * FLOAT64.unit * (self.norms + self.rounding)
        self.rounding *= _cushion(d)
        for side, ones in ((self.left, other_pieces), (self.right, own_pieces)):
            side[len(x) :], side[:, d + 2 * pieces :], side[:, ones] = 0, 0, 1
        self.left[len(x) :, d] = self.right[len(x) :, d + pieces] = torch.inf
        self.blocks = padded // BLOCK
        self.block_norms = self.norms.view(-1, BLOCK).amax(dim=1)


class Centre(NamedTuple):
    """What is taken off every row, and the power of two that brings the longest below 1."""

    mean: Float[Tensor, " d"]
    scale: float

    @classmethod
    def of(cls, *sets: Float[Tensor, "_ d"]) -> Centre:
        """The mean of the first set; a scale for all."""
        mean = torch.zeros(sets[0].shape[1], dtype=torch.float64, device=sets[0].device)
        for part in _ranges(len(sets[0]), by_device(_PREPARED, mean.device)):
            mean += sets[0][part].sum(dim=0, dtype=torch.float64)
        mean /= len(sets[0])
        reach = torch.zeros_like(mean)
        for rows in sets:
            reach = reach.maximum(mean - rows.amin(dim=0)).maximum(rows.amax(dim=0) - mean)
        largest = max(float(reach.max()), _NOT_ZERO)
        longest = float(torch.linalg.vector_norm(reach / largest)) * largest
        _, exponent = math.frexp(longest)
        return cls(mean, 2.0 ** -max(exponent, -_STEEPEST))


class Screen:
    """All pairs within one set of rows, or between two, in one arithmetic."""

    def __init__(
        self,
        x: Float[Tensor, "row d"],
        other: Float[Tensor, "column d"] | None = None,
        arithmetic: Arithmetic = FLOAT32,
        tile: int | None = None,
    ) -> None:
        centre = Centre.of(x) if other is None else Centre.of(x, other)
        self.arithmetic = arithmetic
        self.scale = centre.scale
        self.one_set = other is None
        self.rows = Side(x, centre, arithmetic)
        self.columns = self.rows if other is None else Side(other, centre, arithmetic)
        n, unit = x.shape[1] + 2 * arithmetic.pieces, arithmetic.unit
        self.cushion = _cushion(n)
        self.eta = relative_error(x.shape[1])
        self._error = (_gamma(n, unit) + 4 * unit + _gamma(n + 8, FLOAT64.unit)) * self.cushion  # E
        # U: every product, and once more for float64 numbers of the rows that are lost when they are scaled
        self._underflow = 2 * n * torch.finfo(arithmetic.sums).tiny
        smallest = math.ulp(0.0) * self.scale  # a distance is no finer than that
        self.slack = (self.rows.rounding + self.columns.rounding.max() + smallest) * self.cushion
        self._tile = tile or by_device(TILE, x.device)
        self._buffer: Tensor | None = None

    def value_error(self, a: Float[Tensor, "*rows"], b: Float[Tensor, "*columns"]) -> Float[Tensor, "*pairs"]:
        """The proven bound: |v_ij - |y_i - y_j|^2| <= E (a_i + a_j)^2 + U, broadcast.

        In words: a screened value is off the squared distance of the rounded rows by no more than the square
        of the sum of their lengths, times the relative error E of a sum of products, plus what underflows.
        """
        return (a + b).square_().mul_(self._error).add_(self._underflow)

    def distances_at_most(
        self, rows: Int[Tensor, " some"], highest: Float[Tensor, "some other"]
    ) -> Float[Tensor, "some other"]:
        """Distances not exceeded where |y_i - y_j|^2 is at most ``highest``, which is overwritten."""
        scaled = highest.clamp_min_(0).sqrt_().add_(self.slack[rows][:, None])
        return scaled.mul_((1 + self.eta) * self.cushion / self.scale)

    # Every pair, tile by tile.

    def tiles(self) -> list[Tile]:
        """All tiles; within one set those on and above the diagonal."""
        return [
            Tile(a, b)
            for a in _ranges(len(self.rows.left), self._tile)
            for b in _ranges(len(self.columns.left), self._tile)
            if not (self.one_set and b.start < a.start)
        ]

    def minima(self, histogram: Histogram | None = None, each: EachTile = here) -> Float[Tensor, "row block"]:
        """For each row the smallest screened value in each block of columns, itself left out.

        With ``histogram`` every pair is counted there on the way.
        """
        minima = torch.full(
            (len(self.rows.left), self.columns.blocks),
            torch.inf,
            dtype=self.arithmetic.sums,
            device=self.rows.left.device,
        )
        tiles = self.tiles()
        for (a, b), tile in zip(tiles, each(self, tiles, histogram is not None), strict=True):
            minima[a, _blocks(b)] = tile.rows
            if tile.columns is not None:
                minima[b, _blocks(a)] = tile.columns
            if histogram is not None and tile.counts is not None:
                histogram.counts += tile.counts
        self._buffer = None
        return minima

    def find(self, tile: Tile, counting: bool = False) -> TileMinima:
        """What one tile knows; it depends on nothing but the rows."""
        values = self._values(tile)
        diagonal = self.one_set and tile.rows == tile.columns
        counts = bin_counts(values, above_diagonal=diagonal) if counting else None
        across = values.view(len(values), -1, BLOCK).amin(dim=2)
        if diagonal or not self.one_set:
            return TileMinima(across, None, counts)
        return TileMinima(across, values.view(-1, BLOCK, values.shape[1]).amin(dim=1).T, counts)

    def _values(self, tile: Tile) -> Float[Tensor, "row column"]:
        """Screened values of a tile, what is no pair infinite; overwritten by the next tile's."""
        left, right = self.rows.left[tile.rows], self.columns.right[tile.columns]
        if self._buffer is None:
            size = min(self._tile, len(self.rows.left)) * min(self._tile, len(self.columns.left))
            self._buffer = torch.empty(size, dtype=self.arithmetic.sums, device=left.device)
        out = self._buffer[: len(left) * len(right)].view(len(left), len(right))
        values = self.arithmetic.product(left, right, out)
        if self.one_set and tile.rows == tile.columns:
            values.fill_diagonal_(torch.inf)
        return values

    def row_values(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some column"]:
        """Screened values of a few rows against all columns, what is no pair infinite."""
        values = self.arithmetic.product(self.rows.left[rows], self.columns.right)
        if self.one_set:
            values.scatter_(1, rows[:, None], torch.inf)
        return values

    def sample_minima(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some block"]:
        """The minima of a few rows."""
        return self.row_values(rows).view(len(rows), -1, BLOCK).amin(dim=2)

    def turned(self) -> Screen:
        """The same pairs with rows and columns exchanged."""
        other = copy(self)
        other.rows, other.columns = self.columns, self.rows
        return other

    # What the minima leave open.

    def open_blocks(
        self,
        rows: Int[Tensor, " some"],
        minima: Float[Tensor, "some block"],
        limits: Float[Tensor, " some"] | None = None,
    ) -> tuple[Bool[Tensor, "some block"], Float[Tensor, " some"]]:
        """In which blocks a row may have a pair within its squared limit; those limits.

        Without limits: what no nearest neighbour of a row exceeds.
        """
        error = self.value_error(self.rows.norms[rows][:, None], self.columns.block_norms)
        if limits is None:
            nearest = self.distances_at_most(rows, (minima + error).amin(dim=1, keepdim=True))[:, 0]
            limits = self.squared_limits(rows, nearest)
        return error.add_(limits[:, None]) >= minima, limits

    def squared_limits(
        self, rows: Int[Tensor, " some"], radii: Float[Tensor, " some"]
    ) -> Float[Tensor, " some"]:
        """What |y_i - y_j|^2 does not exceed for pairs no farther apart than ``radii``, row by row."""
        scaled = radii * self.scale * (1 + self.eta) + self.slack[rows]
        return scaled.square_().mul_(self.cushion).masked_fill_(rows >= self.rows.count, -torch.inf)

    def candidates(
        self, entries: Int[Tensor, "entry 2"], limits: Float[Tensor, " row"]
    ) -> Iterator[tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]]:
        """The pairs that may lie within the rows' squared limits; entries: (block, row), blocks in order."""
        for blocks, rows, values in self._block_values(entries):
            error = self.value_error(self.rows.norms[rows], self.columns.block_norms[blocks])
            highest = limits[rows] + error
            entry, inside = (values <= _rounded_up(highest, values.dtype)[:, None]).nonzero().T
            first, second = rows[entry], blocks[entry] * BLOCK + inside
            pairs = second < self.columns.count
            if self.one_set:
                pairs &= first != second
            yield first[pairs], second[pairs]

    def block_nearest(
        self, entries: Int[Tensor, "entry 2"], pieces: int
    ) -> tuple[Int[Tensor, "entry piece"], Float[Tensor, "entry piece"]]:
        """For each (block, row), blocks in order: in each piece of the block the column with the smallest
        screened value, and a distance it does not exceed; infinite where there is none."""
        nearest: list[Tensor] = []
        highest: list[Tensor] = []
        for blocks, rows, values in self._block_values(entries):
            if self.one_set:
                own = (blocks == rows // BLOCK).nonzero().flatten()
                values[own, rows[own] % BLOCK] = torch.inf
            value, inside = values.view(len(values), pieces, -1).min(dim=2)
            starts = torch.arange(0, BLOCK, BLOCK // pieces, device=rows.device)
            nearest.append(blocks[:, None] * BLOCK + starts + inside)
            error = self.value_error(self.rows.norms[rows], self.columns.block_norms[blocks])
            highest.append(self.distances_at_most(rows, value.double() + error[:, None]))
        return torch.cat(nearest), torch.cat(highest)

    def _block_values(
        self, entries: Int[Tensor, "entry 2"]
    ) -> Iterator[tuple[Int[Tensor, " some"], Int[Tensor, " some"], Float[Tensor, "some inside"]]]:
        """Screened values of rows against the columns of a block; entries: (block, row), blocks in order."""
        for part in entries.split(by_device(_DECIDED, entries.device)):
            blocks, rows = part.T
            left = self.rows.left[rows]
            values = torch.empty(len(rows), BLOCK, dtype=self.arithmetic.sums, device=left.device)
            present, counts = blocks.unique_consecutive(return_counts=True)
            start = 0
            for block, count in zip(present.tolist(), counts.tolist(), strict=True):
                right = self.columns.right[block * BLOCK : (block + 1) * BLOCK]
                self.arithmetic.product(left[start : start + count], right, values[start : start + count])
                start += count
            yield blocks, rows, values


def tile_count(rows: int, device: str) -> int:
    """Tiles of a scan within one set of so many distinct rows, on a kind of device."""
    side = -(-rows // TILE.get(device, TILE["cpu"]))
    return side * (side + 1) // 2


def _gamma(n: int, unit: float) -> float:
    """The relative error of a sum of n products, in any order, by additions of this unit."""
    return n * unit / (1 - n * unit)


def _cushion(n: int) -> float:
    """A factor a little above 1: what computing a bound of n terms in float64 may itself lose."""
    return 1 + 4 * _gamma(n + 8, FLOAT64.unit)


def _rounded_up(x: Float[Tensor, " some"], dtype: torch.dtype) -> Float[Tensor, " some"]:
    return torch.nextafter(x.to(dtype), torch.full((), torch.inf, dtype=dtype, device=x.device))


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)


def _ranges(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
