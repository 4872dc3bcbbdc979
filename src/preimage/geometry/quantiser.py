"""How states are stored in a few bits: the quantiser, and the tables its steps and codes come from.

A new granularity or range is one more entry, read by options, errors and help. Quick to import: wrong options
are refused before torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from preimage.errors import OptionError

if TYPE_CHECKING:
    from preimage.geometry.grids import QuantiserGrid

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


@dataclass(frozen=True)
class Quantiser:
    """How states are stored in few bits; another one is a subclass with its own ``fit``.

    ``bits``: 2 to 16. ``granularity``: one step for the "layer", for each "channel" or for each "vector"
    (``GRANULARITIES``). ``range``: "absmax" is symmetric around 0, its codes -(2^(b-1) - 1) .. 2^(b-1) - 1;
    "minmax" spans the smallest to the largest value, always with 0 in it, by codes 0 .. 2^b - 1; "percentile"
    is symmetric and cuts off what is larger than that ``percentile`` of |h|, more than 0 and at most 100.

    >>> import torch
    >>> states = torch.tensor([[0.5, -1.0], [0.1, 0.7]])
    >>> grid = Quantiser(bits=2).fit(states)
    >>> grid.encode(states).tolist()
    [[0, -1], [0, 1]]
    """

    bits: int = 8
    granularity: str = "layer"
    range: str = "absmax"
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
    def name(self) -> str:
        """What tells it from others in a sweep, whatever the bits."""
        return f"{self.granularity}-{self.range}"

    @property
    def codes(self) -> tuple[int, int]:
        """The smallest and the largest code."""
        largest = 2 ** (self.bits - 1) - 1
        return (-largest, largest) if RANGES[self.range].symmetric else (0, 2**self.bits - 1)

    def fit(self, x: Any) -> QuantiserGrid:
        """Steps and zero points for these states (row x d)."""
        from preimage.geometry.grids import fit_grid

        return fit_grid(self, x)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)
