"""Options of the geometry; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from preimage.errors import OptionError
from preimage.geometry.quantisers import Quantiser

GRID = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class GeometryOptions:
    """What arXiv 2511.14808 leaves open is an option here.

    ``quantile``: of the prompts' own margins and ratios. ``eps``: distances of near-collisions, counted as
    they are and relative to the mean norm. ``quantiser``: how states are stored in few bits, for each of the
    ``bits`` that is not None; None is full precision. ``propagate``: every block is given what was stored of
    the layer before it, at every position, instead of states that are only stored. ``subsets``: random tenths
    of the prompts that give intervals in full precision, 0 for none, drawn by ``seed``.
    """

    bits: tuple[int | None, ...] = (None, 8, 4)
    quantile: float = 0.01
    eps: tuple[float, ...] = GRID
    quantiser: Quantiser = field(default_factory=Quantiser)
    propagate: bool = False
    subsets: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise OptionError(f"quantile is {self.quantile}.", "Give 0 to 1.")
        if not self.eps or not all(value > 0 for value in self.eps):
            raise OptionError(f"eps is {self.eps}.", "Give distances above 0.")
        if self.subsets < 0 or self.subsets == 1:
            raise OptionError(f"subsets is {self.subsets}.", "Give 0, or at least 2.")
        if not self.bits or len(set(self.bits)) < len(self.bits):
            raise OptionError(f"bits is {self.bits}.", "Give None, or 2 to 16, each once.")
        for bits in self.bits:
            if bits is not None and not 2 <= bits <= 16:
                raise OptionError(f"bits is {bits}.", "Give None, or 2 to 16.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"bits": list(self.bits), "eps": list(self.eps)}
