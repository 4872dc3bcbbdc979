"""What was seen of a state. An observation sits between F^l and whoever compares with it.

The raw residual stream is the identity. A rounded, projected, permuted or otherwise changed copy is another
function of the same states: candidates are passed through it before they are compared with what was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

# A map from states (rows x d_model) to what is seen of them (rows x anything).
Observation: TypeAlias = Callable[[Tensor], Tensor]


def residual_stream(states: Tensor) -> Tensor:
    """The state itself."""
    return states


def storage_roundoff(stored: torch.dtype, computed: torch.dtype) -> float:
    """Bound on |h_stored - h| / |h| that storing in a coarser type adds; 0 where it is not coarser."""
    return torch.finfo(stored).eps / 2 if _coarser(stored, computed) else 0.0


def stored_type(states: Float[Tensor, "*row d"]) -> torch.dtype:
    """The type states were rounded to: their own, or a coarser one that holds every value exactly.

    numpy has no bfloat16, so half-precision states often come as float32.
    """
    for dtype in (torch.bfloat16, torch.float16):
        if _coarser(dtype, states.dtype) and bool((states.to(dtype).to(states.dtype) == states).all()):
            return dtype
    return states.dtype


def rounding_cell(states: Float[Tensor, "*row d"]) -> tuple[Float[Tensor, "*row d"], Float[Tensor, "*row d"]]:
    """The least and the largest value that is stored as each of these: half-way to its neighbours, float64.

    Bits of floating-point numbers count up with their size, so that the neighbours are the next integers.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[states.dtype.itemsize]
    exact = states.to(torch.float64)
    size = states.abs()
    bits = size.view(integers)
    below = torch.where(bits > 0, bits - 1, bits).view(states.dtype).to(torch.float64)
    above = (bits + 1).view(states.dtype).to(torch.float64)
    size = size.to(torch.float64)
    above = torch.where(torch.isfinite(above), above, 2 * size - below)  # beyond the largest number
    inner, outer = (size + below) / 2, (size + above) / 2
    inner = torch.where(size > 0, inner, -outer)  # zero has a neighbour on either side
    negative = exact < 0
    return torch.where(negative, -outer, inner), torch.where(negative, -inner, outer)


def _coarser(stored: torch.dtype, computed: torch.dtype) -> bool:
    return torch.finfo(stored).eps > torch.finfo(computed).eps
