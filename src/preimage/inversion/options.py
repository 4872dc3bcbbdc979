"""Options of an inversion; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from preimage.errors import OptionError

Method: TypeAlias = Literal["fast", "sipit", "brute-force"]
METHODS: tuple[str, ...] = get_args(Method)
PROPOSERS = ("lens", "codebook", "prior", "gradient")


@dataclass(frozen=True)
class InvertOptions:
    """How to search, and when to stop.

    ``fast`` proposes every position at once and verifies in whole passes; ``sipit`` is the paper's gradient
    policy, ``brute-force`` its random one.

    ``proposers`` says what ``fast`` ranks tokens by, separated by commas: ``lens`` (trained), ``codebook``
    (fitted in closed form), ``prior`` (the model's own next-token prediction), ``gradient`` (SIPIT's descent,
    where the ranking failed); None takes the best there is. ``prove`` evaluates the whole vocabulary at every
    position of what was recovered, for the exact margin.

    ``tolerance`` is relative to |h_t|; None derives it from the noise floor. ``published_cost`` runs SIPIT
    without prefix cache, one candidate at a time, through all blocks, as its authors' code does.
    """

    method: str = "fast"  # one of METHODS
    proposers: str | None = None  # some of PROPOSERS, separated by commas
    prove: bool = False
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
        if self.proposers is not None:
            self._check_proposers()
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

    def _check_proposers(self) -> None:
        unknown = [name for name in self.wanted if name not in PROPOSERS]
        if unknown or not self.wanted:
            raise OptionError(
                f"Proposers {self.proposers!r} are not known.", f"Use some of {', '.join(PROPOSERS)}."
            )
        if self.method != "fast":
            raise OptionError(f"Method {self.method} has its own order.", "Give proposers to fast alone.")
        if self.wanted == ("gradient",):
            raise OptionError("The gradient alone is SIPIT.", "Choose the method sipit.")

    @property
    def wanted(self) -> tuple[str, ...]:
        """The proposers that were named; none: the best there is."""
        return tuple(name.strip() for name in (self.proposers or "").split(",") if name.strip())

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)
