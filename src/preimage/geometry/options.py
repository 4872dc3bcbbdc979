"""Options of the geometry; the same objects serve Python, the command line and the saved json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from preimage import models
from preimage.errors import OptionError
from preimage.geometry.quantiser import Quantiser

EPSILONS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class GeometryOptions:
    """What arXiv 2511.14808 leaves open is an option here.

    ``bits``: of quantised states, 2 to 16 each; None is full precision, which is always measured.
    ``quantile``: of the prompts' own margins and ratios, 0 to 1. ``eps``: distances of near-collisions,
    counted in the units of a state and relative to the mean norm. ``quantiser``: how states are stored, for
    each of the ``bits`` that is not None. ``propagate``: every block is given what was stored of the layer
    before it, at every position, instead of states that are only stored. ``subsets``: random tenths of the
    prompts that give intervals in full precision, 0 for none; ``seed``: of those.

    >>> GeometryOptions(bits=(None, 4), quantiser=Quantiser(granularity="channel")).quantiser.name
    'channel-absmax'
    """

    bits: tuple[int | None, ...] = (None, 8, 4)
    quantile: float = 0.01
    eps: tuple[float, ...] = EPSILONS
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


class GeometryChanges(TypedDict, total=False):
    """Single fields of :class:`GeometryOptions`, as keywords; ``bits`` has its own."""

    quantile: float
    eps: tuple[float, ...]
    quantiser: Quantiser
    propagate: bool
    subsets: int
    seed: int


@dataclass(frozen=True)
class SweepOptions:
    """What a sweep goes over: every combination is one run.

    ``models``: names, as :func:`preimage.load` takes them, or models in memory, which keep their dtype.
    ``lengths``: windows of so many tokens; None: prompts as they are. ``dtypes``: of models given by name.
    ``quantisers``: how states are stored; None: by the quantiser of :class:`GeometryOptions` alone.
    ``device_map``: as in :func:`preimage.load`, for models given by name.

    >>> SweepOptions(["smollm2"], lengths=(8, 16, 32)).dtypes
    ('float32',)
    """

    models: Sequence[str | models.LanguageModel]
    lengths: Sequence[int | None] = (None,)
    dtypes: Sequence[str] = ("float32",)
    quantisers: Sequence[Quantiser] | None = None
    device_map: str | None = None

    def __post_init__(self) -> None:
        given = [self.models, self.lengths, self.dtypes]
        if not all(given) or (self.quantisers is not None and not self.quantisers):
            raise OptionError("A sweep over nothing.", "Give one model, length, dtype and quantiser or more.")
