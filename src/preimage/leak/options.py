"""Options of an audit of what leaks; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from preimage.errors import OptionError
from preimage.leak.exposures import Exposure, parse_exposures

STANDARD = (
    "float32", "bf16", "int8", "int4", "keys", "values", "noise:5", "noise:20", "noise:100", "permuted",
    "last",
)  # fmt: skip
DEFENCES = (
    *(f"noise:{share}" for share in (5, 20, 50, 100, 200, 400, 800)),
    *(f"lowrank:{share}" for share in (20, 100, 400)),
    *(f"clipped:{share}" for share in (20, 100, 400)),
    *(f"cut:{share}" for share in (75, 50, 25, 10)),
    *(f"every:{step}" for step in (2, 4)),
    *("int8", "int4", "permuted", "rotated", "shuffled"),
)


@dataclass(frozen=True)
class LeakOptions:
    """What is exposed, and how much is spent on reading it.

    ``exposures``: specs such as ``float32`` or ``noise:20`` (:class:`Exposure`). ``searched``: prompts for
    which one vector is searched, which takes the longest and succeeds the least, ``search_seconds`` each.
    ``minutes``: what all cells may take. Each has an equal share of what is left when it begins. Its prompts
    are read to the end one after another; where that takes too long for all of them, a third of the share
    is kept for looks at what is proposed for others (searches have their own limits). Cells with the most
    noise, which take the longest, come last. ``utility``: also what the model loses that goes on with the
    changed states. ``margins``: positions of each layer at which every token of the vocabulary is tried, for
    D. ``seed``: of noise and secrets.

    >>> LeakOptions(exposures=("float32", "noise:20")).to_dict()["exposures"]
    ['float32', 'noise:20']
    """

    exposures: tuple[str, ...] = STANDARD
    searched: int = 10
    search_seconds: float = 3.0
    minutes: float = 25.0
    utility: bool = True
    margins: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        parse_exposures(self.exposures)
        for name in ("searched", "margins", "seed"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}.", "Give 0 or more.")
        for name in ("search_seconds", "minutes"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} is {getattr(self, name)}.", "Give a number above 0.")

    @property
    def parsed(self) -> tuple[Exposure, ...]:
        """The exposures, each once."""
        return parse_exposures(self.exposures)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"exposures": [one.spec for one in self.parsed]}


class LeakChanges(TypedDict, total=False):
    """Single fields of :class:`LeakOptions`, as keyword arguments."""

    exposures: tuple[str, ...]
    searched: int
    search_seconds: float
    minutes: float
    utility: bool
    margins: int
    seed: int
