"""Which optimiser is followed, and how far. Quick to import: wrong options are refused before torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from preimage.errors import OptionError

KINDS = ("gradient-descent", "heavy-ball", "adamw")


@dataclass(frozen=True)
class OptimiserOptions:
    """One optimiser, and how far it is followed.

    ``optimiser``: one of ``KINDS``. ``momentum`` is heavy ball's, ``betas`` and ``eps`` are AdamW's.
    ``weight_decay`` is decoupled in AdamW and part of the gradient elsewhere, as in torch.optim. ``method``:
    "exact" has the dense Jacobian of every step; "lanczos" looks at the Hessian's largest eigenvalues only,
    for models too large for that.

    >>> OptimiserOptions("adamw", steps=2).learning_rate
    0.001
    """

    optimiser: str = "gradient-descent"
    steps: int = 3
    learning_rate: float = 1e-3
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    method: str = "exact"

    def __post_init__(self) -> None:
        if self.optimiser not in KINDS:
            raise OptionError(f"optimiser is {self.optimiser!r}.", f"Use one of {', '.join(KINDS)}.")
        if self.method not in ("exact", "lanczos"):
            raise OptionError(f"method is {self.method!r}.", "Use exact or lanczos.")
        if self.steps < 1:
            raise OptionError(f"steps is {self.steps}.", "Give at least 1.")
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise OptionError(f"{name} is {value}.", "Give a number above 0.")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise OptionError(f"weight_decay is {self.weight_decay}.", "Give 0 or more.")
        for value in (self.momentum, *self.betas):
            if not 0 <= value < 1:
                raise OptionError(f"A momentum or beta is {value}.", "Give 0 or more, less than 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"betas": list(self.betas)}


class OptimiserChanges(TypedDict, total=False):
    """Single fields of :class:`OptimiserOptions`, as keyword arguments."""

    optimiser: str
    steps: int
    learning_rate: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    method: str
