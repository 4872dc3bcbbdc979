"""What an activation looks like when it is stored in a few bits: the values a quantiser can store.

Codes are whole numbers; a code times the step, from the zero point, is the value that is stored. All of it
is computed in float64, so that the rounding of states is the quantiser's alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import relative_error, row_distances
from preimage.geometry.quantiser import GRANULARITIES, RANGES, Quantiser


def fit_grid(quantiser: Quantiser, x: Float[Tensor, "row d"]) -> QuantiserGrid:
    """Steps and zero points for these states."""
    ends = RANGES[quantiser.range].ends(x, GRANULARITIES[quantiser.granularity], quantiser.percentile)
    low, high = (end.double() for end in ends)
    first, last = quantiser.codes
    symmetric = RANGES[quantiser.range].symmetric
    step = high / last if symmetric else (high - low) / (last - first)
    step = torch.where(step > 0, step, torch.ones_like(step))  # nothing but zeros: any step will do
    zero = torch.zeros_like(step) if symmetric else (first - low / step).round()
    return QuantiserGrid(step, zero, first, last)


@dataclass(frozen=True)
class QuantiserGrid:
    """The values a quantiser can store, by codes ``first`` to ``last``; step and zero broadcast over states.

    ``step`` is in the units of a state, ``zero`` the code of 0.
    """

    step: Float[Tensor, "rows columns"]
    zero: Float[Tensor, "rows columns"]
    first: int
    last: int

    @property
    def shared(self) -> bool:
        """Whether all rows have the same steps, so that codes alone tell whether they are equal."""
        return self.step.shape[0] == 1

    def at(self, rows: Int[Tensor, " row"]) -> QuantiserGrid:
        """The grid of some of the rows it was fitted to."""
        return self if self.shared else replace(self, step=self.step[rows], zero=self.zero[rows])

    def to(self, device: torch.device | str) -> QuantiserGrid:
        """The same grid on another device."""
        return replace(self, step=self.step.to(device), zero=self.zero.to(device))

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
        moved = max(float(self.step.max()) * math.sqrt(x.shape[1]), farthest)
        return margin > moved * (1 + 8 * relative_error(x.shape[1]))  # all three distances are rounded
