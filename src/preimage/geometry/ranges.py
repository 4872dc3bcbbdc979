"""Where a quantiser's steps and codes come from: one table each, read by options, errors and help.

A new granularity or range is one more entry. Nothing here imports torch, so that help need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# The axes of states (row, coordinate) over which one step is shared.
GRANULARITIES: dict[str, tuple[int, ...]] = {"layer": (0, 1), "channel": (0,), "vector": (1,)}


class CodeRange(NamedTuple):
    """Which values the codes span.

    ``ends``: from states (row x d), axes and a percentile, the smallest and the largest value, with the axes
    kept as 1. ``symmetric``: codes -(2^(b-1) - 1) .. 2^(b-1) - 1 around 0, else 0 .. 2^b - 1.
    """

    ends: Callable[[Any, tuple[int, ...], float], tuple[Any, Any]]
    symmetric: bool


def _absmax(x: Any, axes: tuple[int, ...], _: float) -> tuple[Any, Any]:
    high = x.abs().amax(axes, keepdim=True)
    return -high, high


def _minmax(x: Any, axes: tuple[int, ...], _: float) -> tuple[Any, Any]:
    return x.amin(axes, keepdim=True).clamp_max(0.0), x.amax(axes, keepdim=True).clamp_min(0.0)


def _percentile(x: Any, axes: tuple[int, ...], percent: float) -> tuple[Any, Any]:
    """The smallest |h| that so many percent do not exceed; torch.quantile takes 16 million at most."""
    flat = x.abs().flatten()[:, None] if axes == (0, 1) else (x.abs() if axes == (0,) else x.abs().T)
    rank = max(1, min(len(flat), -(-int(len(flat) * percent * 1000) // 100_000)))
    value = flat.kthvalue(rank, dim=0).values
    high = value[:, None] if axes == (1,) else value[None, :]
    return -high, high


RANGES = {
    "absmax": CodeRange(_absmax, symmetric=True),  # around 0, up to the largest |h|
    "minmax": CodeRange(_minmax, symmetric=False),  # from the smallest to the largest value, with 0 in it
    "percentile": CodeRange(_percentile, symmetric=True),  # |h| above that percentile is cut off
}
