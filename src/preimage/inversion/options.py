"""Options of an inversion; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from preimage.errors import OptionError

Method: TypeAlias = Literal["fast", "sipit", "brute-force"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True)
class InvertOptions:
    """How to search, and when to stop.

    ``fast`` proposes every position at once and verifies in whole passes; ``sipit`` is the paper's gradient
    policy, ``brute-force`` its random one.

    ``tolerance`` is relative to |h_t|; None derives it from the noise floor. ``published_cost`` runs SIPIT
    without prefix cache, one candidate at a time, through all blocks, as its authors' code does.
    """

    method: str = "fast"  # one of METHODS
    seed: int = 0
    tolerance: float | None = None
    max_tests: int | None = None  # verifier tests for one prompt; None: positions x vocabulary
    timeout: float | None = None  # seconds for one prompt
    learning_rate: float = 1.0
    gradient_cap: float = 1.0  # largest gradient norm
    snap_every: int = 50  # proposals between two snaps of the proxy to a token
    patience: int | None = 512  # gradient proposals a position before plain enumeration; None: never
    published_cost: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(f"Method {self.method!r} is not known.", f"Use {', '.join(METHODS)}.")
        if self.published_cost and self.method == "fast":
            raise OptionError("published_cost is SIPIT's or brute force's.", "Choose one of them as method.")
        positive = (
            "tolerance",
            "max_tests",
            "timeout",
            "learning_rate",
            "gradient_cap",
            "snap_every",
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name} is {value}.", "Give a number above 0.")
        if self.patience is not None and self.patience < 0:
            raise OptionError(f"patience is {self.patience}.", "Give 0 or more.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)
