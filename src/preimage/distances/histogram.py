"""How the distances of all pairs are distributed, counted on the way through the screen."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Quantile(NamedTuple):
    """A quantile of all distances: between ``low`` and ``high``, both proven; ``value`` is in the middle."""

    value: float
    low: float
    high: float


_SHIFT = 12  # bits of a float32 that do not tell its bin
_BINS = 2 ** (31 - _SHIFT)
_INFINITE = 0x7F800000 >> _SHIFT  # the bin of what is no pair


def counted(
    values: Float[Tensor, "row column"],
    *,
    upper: bool = False,
    weights: Int[Tensor, "row column"] | None = None,
) -> Int[Tensor, " bin"]:
    """How many values lie in each bin, all or those above the diagonal, each as often as its weight says."""
    if upper:
        values = values.masked_fill(torch.ones_like(values, dtype=torch.bool).tril(), torch.inf)
    keys = values.float().clamp_min(0.0).view(torch.int32) >> _SHIFT
    often = None if weights is None else weights.double().flatten()
    return torch.bincount(keys.flatten(), often, minlength=_BINS).long()


class Histogram:
    """Counts of squared values by the leading bits of their float32: bins of 1/2048 of a value.

    Bits of positive floats are in the order of the floats, so that binning is a shift.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def edges(self, index: int) -> tuple[float, float]:
        """The smallest and the largest value of a bin."""
        low, high = ((index << _SHIFT), ((index + 1) << _SHIFT) - 1)
        ends = torch.tensor([low, high], dtype=torch.int32).view(torch.float32)
        return float(ends[0]), float(ends[1])

    def spread(self, error: float, slack: float, scale: float) -> Spread:
        """The distances behind the counts: squared and scaled values are off by at most ``error``, scaled
        distances by ``slack`` more."""
        return Spread(self, error, slack, scale)


class Spread:
    """The distances of all pairs, counted in bins of 1/4096 of a distance."""

    def __init__(self, histogram: Histogram, error: float, slack: float, scale: float) -> None:
        self._histogram = histogram
        self._cumulative = histogram.counts[:_INFINITE].cumsum(0).cpu()
        self._error, self._slack, self._scale = error, slack, scale

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
