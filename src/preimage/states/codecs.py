"""Numbers kept in few bits: what they may have been before.

States are kept as half-precision floats, as fp8 with scales, or as whole numbers times a step. What comes
back are the dequantised numbers, and nothing says how they were kept: it is found out from the numbers. Each
of them stands for a cell: whatever is kept as this very number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.errors import StatesError
from preimage.states.lattices import SINGLE, SLACK, coded_cells
from preimage.states.observation import rounding_cell, storage_roundoff, stored_type

_FLOATS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _FLOATS.items()} | {torch.float64: "float64"}
_SAMPLE = 16  # numbers of a line that are looked at first, of so many lines
_LINES = 4
_FEW = 6  # numbers that tell most states from codes


class Cells(NamedTuple):
    """The least and the largest value that each number may stand for, float64; infinite where it was cut."""

    low: Float[Tensor, "position width"]
    high: Float[Tensor, "position width"]
    name: str  # "bf16", "int8 per token"

    @property
    def exact(self) -> bool:
        """Whether every number is what was computed."""
        return self.low is self.high

    @property
    def roundoff(self) -> float:
        """The largest |h_stored - h| / |h| that keeping them so may have added; what was cut left out."""
        if self.exact:
            return 0.0
        cut = torch.isinf(self.low) | torch.isinf(self.high)
        half, centre = ((self.high + sign * self.low).masked_fill(cut, 0.0) / 2 for sign in (-1, 1))
        return float((half.norm(dim=-1) / centre.norm(dim=-1).clamp_min(1e-300)).max())


def stored_cells(
    observed: Float[Tensor, "position width"],
    stored: str | None,
    computed: torch.dtype,
    *,
    codes: bool = True,
) -> Cells:
    """The cells of one prompt's numbers, of which all positions are valid, on the CPU.

    ``stored``: how they were kept, one of ``preimage.observations.STORED``; None finds out, and takes numbers
    for codes only where that is beyond doubt. The granularity is found out in any case. ``computed``: the
    model's type; floats as fine as that are exact. ``codes``: without them only float types are found out.
    """
    numbers = observed.detach().cpu()
    if not bool(torch.isfinite(numbers).all()):
        raise StatesError("Some of the states are not finite.", "Leave out what is infinite or no number.")
    carrier = stored_type(numbers)
    if stored in _FLOATS:
        return _float_cells(numbers, _FLOATS[stored], computed)
    if stored is None and not (codes and _looks_coded(numbers, carrier)):
        return _float_cells(numbers, carrier, computed)
    cells = coded_cells(numbers.to(torch.float64), stored, torch.finfo(carrier).eps / 2)
    if cells is not None:
        return Cells(*cells)
    if stored is None:
        return _float_cells(numbers, carrier, computed)
    raise StatesError(
        f"These states are not {stored} of any known kind: their numbers are on no such lattice.",
        "Give them as they were dequantised, or leave stored= out to have it found out.",
    )


def may_be_stored(
    observed: Float[Tensor, "prompt position width"], lengths: Int[Tensor, " prompt"], computed: torch.dtype
) -> Bool[Tensor, " prompt"]:
    """Which prompts' numbers may stand for cells, by a look at a few of them; False is certain."""
    if storage_roundoff(observed.dtype, computed):
        return torch.ones(len(observed), dtype=torch.bool)
    lines = _lines(observed, lengths)
    few = lines.flatten(1)
    halves = [_held(few, half).all(dim=1) for half in (torch.bfloat16, torch.float16, torch.float32)]
    coarse = torch.stack(halves).any(dim=0)
    unit = torch.finfo(observed.dtype).eps / 2
    return coarse | _on_lattices(lines.to(torch.float64), lengths.to(lines.device), unit)


def dequantised(
    codes: Tensor, scales: Tensor | float, zero_points: Tensor | float | None = None
) -> Float[Tensor, "*row width"]:
    """(codes - zero points) * scales in float32, for int8, uint8 and float8 codes (rows x width).

    Scales and zero points: one, one a token (rows, or rows x 1), one a channel (width, or 1 x width), or one
    for each group of neighbouring coordinates (rows x groups).
    """
    values = codes.to(torch.float32)
    if zero_points is not None:
        values = values - _spread(zero_points, codes.shape, "zero points")
    return values * _spread(scales, codes.shape, "scales")


def _spread(given: Tensor | float, shape: Sequence[int], name: str) -> Tensor:
    """Scales or zero points in a shape that broadcasts over codes."""
    values = torch.as_tensor(given).to(torch.float32)
    rows, width = tuple(shape[:-1]), shape[-1]
    if values.dim() == 1 and values.shape == rows and values.shape != (width,):
        values = values[:, None]
    grouped = values.dim() == len(shape) and values.shape[:-1] == rows and values.shape[-1] > 0
    if grouped and values.shape[-1] != width and width % values.shape[-1] == 0:
        values = values.repeat_interleave(width // values.shape[-1], dim=-1)
    ambiguous = values.shape == rows == (width,)
    try:
        fits = torch.broadcast_shapes(values.shape, shape) == torch.Size(shape) and not ambiguous
    except RuntimeError:
        fits = False
    if not fits:
        sizes = f"{tuple(values.shape)} for codes of {tuple(shape)}"
        raise StatesError(
            f"The {name} are {sizes}.", "Give one, or one a token (rows x 1) or a channel (1 x width)."
        )
    return values


# Floats.


def _held(numbers: Tensor, dtype: torch.dtype) -> Bool[Tensor, "*shape"]:
    """Which numbers a coarser type holds exactly; none where it is not coarser."""
    if torch.finfo(dtype).eps <= torch.finfo(numbers.dtype).eps:
        return torch.zeros_like(numbers, dtype=torch.bool)
    return numbers.to(dtype).to(numbers.dtype) == numbers


def _float_cells(numbers: Tensor, stored: torch.dtype, computed: torch.dtype) -> Cells:
    coarser = torch.finfo(stored).eps > torch.finfo(numbers.dtype).eps
    if stored is not torch.float32 and coarser and not bool(_held(numbers, stored).all()):
        name = _NAMES[stored]
        raise StatesError(f"These states are finer than {name}.", "Name another type, or none.")
    if storage_roundoff(stored, computed):
        return Cells(*rounding_cell(numbers.to(stored)), _NAMES[stored])
    exact = numbers.to(torch.float64)
    return Cells(exact, exact, _NAMES.get(stored, str(stored)))


# A first look.


def _lines(
    observed: Float[Tensor, "prompt position width"], lengths: Int[Tensor, " prompt"]
) -> Float[Tensor, "prompt way line number"]:
    """A few numbers of each prompt's last position, and a few of some coordinates, at valid positions."""
    prompts, width = len(observed), observed.shape[2]
    row = torch.arange(prompts, device=observed.device)[:, None, None]
    line = torch.arange(_LINES, device=observed.device)[:, None]
    number = torch.arange(_SAMPLE, device=observed.device)
    lengths = lengths.to(observed.device)[:, None, None]
    across = (line * max(_SAMPLE, width // _LINES // 32 * 32) + number) % width  # never across two groups
    along = observed[row, number % lengths, (line * 7 + width // 3) % width]
    return torch.stack([observed[row, lengths - 1, across], along], dim=1)


def _on_lattices(
    lines: Float[Tensor, "prompt way line number"], lengths: Int[Tensor, " prompt"], unit: float
) -> Bool[Tensor, " prompt"]:
    """Whether all lines of one way look like codes; all are looked at where a few numbers do.

    One or two positions say nothing of what a channel shares.
    """
    ways = torch.stack([torch.ones_like(lengths, dtype=torch.bool), lengths > 2], dim=1)
    ways &= _on_lattice(lines[:, :, :1, :_FEW], unit)[..., 0]
    if bool(ways.any()):
        ways &= _on_lattice(lines, unit).all(dim=-1)
    return ways.any(dim=1)


def _on_lattice(
    lines: Float[Tensor, "prompt way line number"], unit: float
) -> Bool[Tensor, "prompt way line"]:
    """Whether lines look like codes: whole multiples of a step, from 0 or from the least, or fp8."""
    slack = SLACK * (max(unit, SINGLE) + SINGLE)
    both = torch.stack([lines, lines - lines.amin(dim=-1, keepdim=True)])
    spans = both.abs().amax(dim=-1, keepdim=True).clamp_min(1e-300)
    shares = (both / spans)[..., None, :]
    counts = torch.arange(1.0, 256.0, dtype=lines.dtype, device=lines.device)[:, None]
    units = shares * counts
    errors = slack * units.abs() + 4 * SINGLE * counts
    errors[1] = slack * 2 * (spans[0] / spans[1])[..., None, :] * counts
    errors[1].masked_fill_(errors[1] > 0.25, 0.0)  # steps so fine would fit anything
    whole = ((units - units.round()).abs() <= errors).all(dim=-1).any(dim=-1)
    digits = torch.frexp(shares[0] * counts[7:15]).mantissa * 16  # four digits, the first of them 1
    floats = ((digits - digits.round()).abs() <= slack * 16).all(dim=-1).any(dim=-1)
    return whole[0] | whole[1] | floats


def _looks_coded(numbers: Float[Tensor, "position width"], carrier: torch.dtype) -> bool:
    """Whether one prompt's numbers are worth the trial of every codec."""
    lengths = torch.tensor([len(numbers)])
    lines = _lines(numbers[None], lengths).to(torch.float64)
    return bool(_on_lattices(lines, lengths, torch.finfo(carrier).eps / 2)[0])
