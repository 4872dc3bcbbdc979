"""What was seen of a state. A view sits between F^l and whoever compares with it.

The raw residual stream is the identity. Turned, cut or permuted copies are other functions of the same
states: candidates are passed through them before they are compared with what was seen. What is known well
enough to be undone is undone first, so that everybody else sees plain states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.errors import OptionError, StatesError
from preimage.observations import Observation

# A map from states (rows x d_model) to what is seen of them (rows x anything).
View: TypeAlias = Callable[[Tensor], Tensor]
_ORTHOGONAL = 1e-4  # largest entry of R R^T - I that rounding may leave


def residual_stream(states: Tensor) -> Tensor:
    """The state itself."""
    return states


def view(observation: Observation) -> View:
    """From raw rows to what an observation shows of them: turned, then cut to the kept coordinates.

    Coordinates in an unknown order are seen sorted: sorted rows do not depend on the order. How rows were
    turned by an unknown rotation has to be found out first.
    """
    if observation.plain or observation.rotated:
        return residual_stream
    if observation.permuted:
        return lambda states: states.sort(dim=-1).values
    rotation = None if observation.rotation is None else _rotation(observation)
    kept = None if observation.kept is None else torch.tensor(observation.kept)

    def seen(states: Tensor) -> Tensor:
        if rotation is not None:
            states = (states.to(torch.float64) @ rotation.to(states.device)).to(states.dtype)
        return states if kept is None else states[..., kept.to(states.device)]

    return seen


def undone(
    observed: Float[Tensor, "*row seen"], observation: Observation, width: int
) -> tuple[Float[Tensor, "*row d"], Observation]:
    """Observed rows with known orders and rotations turned back, and what is left of the observation.

    ``width``: that of the raw rows. What was cut cannot be undone: rows and observation come back as they
    are, to be compared through :func:`view`. So do coordinates in an unknown order, or turned unknown how.
    """
    if observation.plain or observation.permuted or observation.rotated:
        return observed, observation
    kept = observation.kept
    if kept is not None:
        if not kept or len(set(kept)) < len(kept) or not all(0 <= index < width for index in kept):
            raise OptionError(
                f"kept are not different coordinates of {width}.", f"Give each once, from 0 to {width - 1}."
            )
        if observed.shape[-1] != len(kept):
            raise StatesError(
                f"The rows have {observed.shape[-1]} coordinates and {len(kept)} are said to be kept.",
                "Name the coordinates that the rows hold, in their order.",
            )
        if len(kept) < width:
            return observed, observation
        observed = observed[..., torch.tensor(kept, device=observed.device).argsort()]
    if observation.rotation is not None:
        rotation = _rotation(observation).to(observed.device)
        if len(rotation) != width or observed.shape[-1] != width:
            raise StatesError(
                f"The rotation is of {len(rotation)} coordinates, states are of {width}.",
                "Give the matrix R with which rows h were turned into h R.",
            )
        observed = (observed.to(torch.float64) @ rotation.T).to(_at_least_single(observed.dtype))
    return observed, observation.changed(kept=None, rotation=None)


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rotation(observation: Observation) -> Float[Tensor, "d d"]:
    """The matrix in float64, if it is one that keeps lengths."""
    matrix = torch.as_tensor(observation.rotation).detach().to(torch.float64)
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise OptionError(f"The rotation is of shape {tuple(matrix.shape)}.", "Give a square matrix.")
    away = float((matrix @ matrix.T - torch.eye(len(matrix), device=matrix.device)).abs().max())
    if not away <= _ORTHOGONAL:
        raise OptionError(
            f"The rotation is not orthogonal: R R^T is off by {away:.2g}.",
            "Give an orthogonal matrix, rows h being turned into h R.",
        )
    return matrix


def storage_roundoff(stored: torch.dtype, computed: torch.dtype) -> float:
    """Bound on |h_stored - h| / |h| that storing in a coarser type adds; 0 where it is not coarser."""
    return torch.finfo(stored).eps / 2 if _coarser(stored, computed) else 0.0


def stored_type(states: Float[Tensor, "*row d"]) -> torch.dtype:
    """The type states were rounded to: their own, or a coarser one that holds every value exactly.

    numpy has no bfloat16, so half-precision states often come as float32.
    """
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if _coarser(dtype, states.dtype) and bool((states.to(dtype).to(states.dtype) == states).all()):
            return dtype
    return states.dtype


def rounding_cell(states: Float[Tensor, "*row d"]) -> tuple[Float[Tensor, "*row d"], Float[Tensor, "*row d"]]:
    """The least and the largest value that is stored as each of these: half-way to its neighbours, float64.

    Bits of floating-point numbers count up with their size, so that the neighbours are the next integers.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[states.dtype.itemsize]
    exact = states.to(torch.float64)
    bits = states.contiguous().view(integers) & torch.iinfo(integers).max  # without the sign
    size = bits.view(states.dtype)
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
