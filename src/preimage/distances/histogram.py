"""How the distances of all pairs are distributed, counted on the way through the screen."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Quantile(NamedTuple):
    """A quantile of all distances, in the units of the rows, with proven bounds on either side."""

    value: float
    low: float
    high: float


# A bin is told by the leading bits of a float32, or by as many of a float64. Bits of positive floats are in
# the order of the floats, so that binning is a shift and rounds nothing; a negative one counts as 0.
_FRACTION = 11  # bits of the fraction that tell a bin
_BINS = 2 ** (8 + _FRACTION)
_INFINITE = 255 << _FRACTION  # the bin of what is no pair
_NORMAL = 1 << _FRACTION  # of the smallest float32 of full precision; all below it counts as one bin
_BIAS = (1023 - 127) << _FRACTION  # between the exponents of float64 and float32


def bin_counts(
    values: Float[Tensor, "row column"],
    *,
    above_diagonal: bool = False,
    weights: Int[Tensor, "row column"] | None = None,
) -> Int[Tensor, " bin"]:
    """How many values lie in each bin, all or those above the diagonal, each as often as its weight says."""
    if above_diagonal:
        values = values.masked_fill(torch.ones_like(values, dtype=torch.bool).tril(), torch.inf)
    if values.dtype == torch.float64:
        keys = (values.view(torch.int64) >> (52 - _FRACTION)).sub_(_BIAS).clamp_(0, _INFINITE)
    else:
        keys = (values.view(torch.int32) >> (23 - _FRACTION)).clamp_(0, _INFINITE)
    often = None if weights is None else weights.double().flatten()
    return torch.bincount(keys.flatten(), often, minlength=_BINS).long()


class Histogram:
    """Counts of squared values in bins of 1/2048 of a value, and of pairs that are 0 apart for certain."""

    def __init__(self, device: torch.device) -> None:
        self.counts: Int[Tensor, " bin"] = torch.zeros(_BINS, dtype=torch.int64, device=device)
        self.same = 0


class DistanceDistribution:
    """The distances of all pairs, counted in bins of 1/4096 of a distance.

    Squared and scaled values are off by at most ``error``, scaled distances by ``slack`` more, and a reported
    distance is off by ``relative`` of itself, which also covers the roundings of the bounds. Distances are in
    the units of the rows once they are divided by ``scale``.
    """

    def __init__(
        self,
        histogram: Histogram,
        error: float = 0.0,
        slack: float = 0.0,
        scale: float = 1.0,
        relative: float = 0.0,
    ) -> None:
        self._same = histogram.same
        self._cumulative = histogram.counts[:_INFINITE].cumsum(0).cpu()
        self._error, self._slack, self._scale, self._relative = error, slack, scale, relative

    @property
    def pairs(self) -> int:
        """Pairs counted."""
        return self._same + int(self._cumulative[-1])

    def quantile(self, q: float) -> Quantile:
        """The distance that a share ``q`` of all pairs does not exceed."""
        rank = min(max(1, math.ceil(q * self.pairs)), self.pairs) - self._same
        if rank < 1:
            return Quantile(0.0, 0.0, 0.0)
        low, high = _edges(int(torch.searchsorted(self._cumulative, rank)))
        less, more = 1 - self._relative, 1 + self._relative
        lowest = max(0.0, max(0.0, low - self._error) ** 0.5 * less - self._slack)
        highest = (high + self._error) ** 0.5 + self._slack
        value = ((low + high) / 2) ** 0.5
        return Quantile(value / self._scale, lowest * less / self._scale, highest * more / self._scale)


def _edges(index: int) -> tuple[float, float]:
    """The ends of a bin of squared values: none is below the first, none reaches the second."""
    return 0.0 if index < _NORMAL else _edge(index), _edge(max(index, _NORMAL - 1) + 1)


def _edge(index: int) -> float:
    exponent, fraction = divmod(index, 1 << _FRACTION)
    return math.ldexp(1 + fraction / (1 << _FRACTION), exponent - 127)
