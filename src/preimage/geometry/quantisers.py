"""Uniform quantisers of states: what an activation looks like when it is stored in a few bits.

Codes are whole numbers; a code times the step, from the zero point, is the value that is stored. All of it
is computed in float64, so that the rounding of states is the quantiser's alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import relative_error, row_distances
from preimage.errors import OptionError

GRANULARITIES = ("layer", "channel", "vector")
RANGES = ("absmax", "minmax", "percentile")


@dataclass(frozen=True)
class Quantiser:
    """``bits``: 2 to 16. ``granularity``: one step for the layer, for each channel or for each vector.

    ``range``: "absmax" is symmetric around 0, its codes -(2^(b-1) - 1) .. 2^(b-1) - 1; "minmax" spans the
    smallest to the largest value, always with 0 in it, by codes 0 .. 2^b - 1; "percentile" is symmetric and
    cuts off what is larger than that percentile of |h|.
    """

    bits: int = 8
    granularity: str = "layer"  # one of GRANULARITIES
    range: str = "absmax"  # one of RANGES
    percentile: float = 99.9

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise OptionError(f"bits is {self.bits}.", "Give 2 to 16.")
        if self.granularity not in GRANULARITIES:
            raise OptionError(
                f"Granularity {self.granularity!r} is not known.", f"Use {', '.join(GRANULARITIES)}."
            )
        if self.range not in RANGES:
            raise OptionError(f"Range {self.range!r} is not known.", f"Use {', '.join(RANGES)}.")
        if not 0 < self.percentile <= 100:
            raise OptionError(f"percentile is {self.percentile}.", "Give more than 0, at most 100.")

    @property
    def codes(self) -> tuple[int, int]:
        """The smallest and the largest code."""
        if self.range == "minmax":
            return 0, 2**self.bits - 1
        largest = 2 ** (self.bits - 1) - 1
        return -largest, largest

    def fit(self, x: Float[Tensor, "row d"]) -> Grid:
        """Steps and zero points for these states."""
        low, high = (end.double() for end in self._reach(x))
        first, last = self.codes
        if self.range == "minmax":
            low, high = low.clamp_max(0.0), high.clamp_min(0.0)
            step = (high - low) / (last - first)
        else:
            step = high / last
        step = torch.where(step > 0, step, torch.ones_like(step))  # nothing but zeros: any step will do
        zero = (first - low / step).round() if self.range == "minmax" else torch.zeros_like(step)
        return Grid(step, zero, first, last)

    def _reach(self, x: Float[Tensor, "row d"]) -> tuple[Tensor, Tensor]:
        axes = {"layer": (0, 1), "channel": (0,), "vector": (1,)}[self.granularity]
        if self.range == "minmax":
            return x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        if self.range == "absmax":
            high = x.abs().amax(axes, keepdim=True)
            return -high, high
        high = _percentile(x.abs(), axes, self.percentile)
        return -high, high

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


@dataclass(frozen=True)
class Grid:
    """The values a quantiser can store; ``step`` and ``zero`` broadcast over states."""

    step: Float[Tensor, "rows columns"]
    zero: Float[Tensor, "rows columns"]
    first: int
    last: int

    @property
    def shared(self) -> bool:
        """Whether all rows have the same steps, so that codes alone tell whether they are equal."""
        return self.step.shape[0] == 1

    def at(self, rows: Int[Tensor, " row"]) -> Grid:
        """The grid of some of the rows it was fitted to."""
        if self.shared:
            return self
        return Grid(self.step[rows], self.zero[rows], self.first, self.last)

    def encode(self, x: Float[Tensor, "row d"]) -> Int[Tensor, "row d"]:
        """The nearest codes, ties to even, cut off at the ends."""
        codes = (x.double() / self.step).round() + self.zero
        return codes.clamp(self.first, self.last).to(torch.int32)

    def decode(self, codes: Int[Tensor, "row d"]) -> Float[Tensor, "row d"]:
        """The stored values, in float64."""
        return (codes.double() - self.zero) * self.step

    def certifies(self, margin: float, x: Float[Tensor, "row d"], stored: Float[Tensor, "row d"]) -> bool:
        """Whether states that are ``margin`` apart at least cannot be stored as the same values.

        Two states that become one have moved at least half their distance. A coordinate within the range
        moves by half a step at most, a state by step * sqrt(d) / 2. What is cut off moves by more: there the
        farthest way any of these states went decides.
        """
        farthest = 2 * float(row_distances(x, stored).max())
        reach = max(float(self.step.max()) * math.sqrt(x.shape[1]), farthest)
        return margin > reach * (1 + 8 * relative_error(x.shape[1]))  # all three distances are rounded


def _percentile(x: Float[Tensor, "row d"], axes: tuple[int, ...], percent: float) -> Tensor:
    """The smallest value that so many percent do not exceed; torch.quantile takes 16 million at most."""
    flat = x.flatten()[:, None] if axes == (0, 1) else (x if axes == (0,) else x.T)
    rank = max(1, min(len(flat), -(-int(len(flat) * percent * 1000) // 100_000)))
    value = flat.kthvalue(rank, dim=0).values
    return value.view(1, 1) if axes == (0, 1) else (value[None, :] if axes == (0,) else value[:, None])
