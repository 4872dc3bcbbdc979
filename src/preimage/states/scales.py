"""Codes with scales beside them: int8, uint8 or fp8 numbers, and what each is to be multiplied by."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from jaxtyping import Shaped
from torch import Tensor

from preimage.errors import StatesError

_SCALES = ("scale", "scales")
_BESIDE = re.compile(r"(^|[._/])(scales?|zeros?|zero_points?)$", re.IGNORECASE)
_ZEROS = ("zero_point", "zero_points", "zero", "zeros")


def scale_of(name: str, names: Collection[str]) -> str | None:
    """The name of the scales of a tensor among others: its own name with an ending, or ``scale`` alone."""
    return _beside(name, names, _SCALES)


def zero_of(name: str, names: Collection[str]) -> str | None:
    """The name of the zero points of a tensor."""
    return _beside(name, names, _ZEROS)


def is_beside(name: str) -> bool:
    """Whether a name is that of scales or zero points, not of states."""
    return _BESIDE.search(name) is not None


def _beside(name: str, names: Collection[str], endings: tuple[str, ...]) -> str | None:
    own = [f"{name}{sign}{ending}" for ending in endings for sign in "_./"]
    return next((one for one in (*own, *endings) if one in names), None)


def multiplied(
    codes: Shaped[Tensor, "*row d"], scale: Tensor, zero: Tensor | None = None
) -> Shaped[Tensor, "*row d"]:
    """The numbers that codes stand for, float32.

    Scales may be one number, one a row (with or without a last axis of 1), one a column, or one a group of
    columns; zero points are taken off the codes first.
    """
    numbers = codes.float()
    if zero is not None:
        numbers = numbers - _spread(zero, codes)
    return numbers * _spread(scale, codes)


def _spread(scale: Tensor, codes: Tensor) -> Tensor:
    """Scales in a shape that goes with their codes."""
    given, shape = scale.float(), tuple(codes.shape)
    rows, width = shape[:-1], shape[-1]
    a_row, a_column = tuple(given.shape) == rows, given.ndim == 1 and len(given) == width
    if a_row and a_column:
        raise StatesError(
            f"{len(given)} scales are as many as there are rows, and as many as columns.",
            f"Save them as {len(given)} x 1 or 1 x {len(given)}.",
        )
    if a_row:
        return given[..., None]
    groups = given.shape[-1] if given.ndim else 1
    if tuple(given.shape[:-1]) == rows and 1 < groups < width and width % groups == 0:
        return given.repeat_interleave(width // groups, dim=-1)
    try:
        return torch.broadcast_to(given, shape)
    except RuntimeError:
        raise StatesError(
            f"Scales of shape {tuple(given.shape)} do not go with codes of shape {shape}.",
            "Save one number, one a row, one a column, or one a group of columns.",
        ) from None
