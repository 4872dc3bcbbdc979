"""What was seen of a state. An observation sits between F^l and whoever compares with it.

The raw residual stream is the identity. A rounded, projected, permuted or otherwise changed copy is another
function of the same states: candidates are passed through it before they are compared with what was seen.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Observation(Protocol):
    """A map from states (rows x d_model) to what is seen of them (rows x anything)."""

    def __call__(self, states: Tensor) -> Tensor:
        """What is seen of each row."""


def residual_stream(states: Tensor) -> Tensor:
    """The state itself."""
    return states


def storage_roundoff(stored: torch.dtype, computed: torch.dtype) -> float:
    """Bound on |h_stored - h| / |h| that storing in a coarser type adds; 0 where it is not coarser."""
    coarser = torch.finfo(stored).eps > torch.finfo(computed).eps
    return torch.finfo(stored).eps / 2 if coarser else 0.0
