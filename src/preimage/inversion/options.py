"""Options of an inversion; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from preimage.errors import OptionError
from preimage.inversion.baselines.settings import HardPromptSettings, VocabularyMatchSettings
from preimage.inversion.proposers.registry import GRADIENT, LENS, proposer_names
from preimage.observations import Observation

if TYPE_CHECKING:
    from preimage.inversion.proposers.standard import Proposer

Method: TypeAlias = Literal[
    "fast", "sipit", "brute-force", "hard-prompts", "vocabulary-match", "nearest-embedding", "logit-lens"
]
METHODS: tuple[str, ...] = get_args(Method)
READERS = METHODS[3:]  # which read every token in their own way, before anything is verified
_ABOVE_0 = ("tolerance", "max_tests", "timeout", "learning_rate", "gradient_cap", "snap_every")


class InvertChanges(TypedDict, total=False):
    """The fields of :class:`InvertOptions` as keywords of a call."""

    observe: str | Observation | None
    prefix: str | Sequence[int]
    method: str
    proposers: str | tuple[str | Proposer, ...] | None
    lens: str | Path | None
    prove: bool
    seed: int
    tolerance: float | None
    max_tests: int | None
    timeout: float | None
    learning_rate: float
    gradient_cap: float
    snap_every: int
    patience: int | None
    published_cost: bool
    hard_prompts: HardPromptSettings
    vocabulary_match: VocabularyMatchSettings


@dataclass(frozen=True)
class InvertOptions:
    """How to search, and when to stop.

    ``method``: ``fast`` proposes every position at once and verifies in whole passes; ``sipit`` is the
    paper's gradient policy, ``brute-force`` its random one. The others read a prompt in their own way, once,
    and what they read is verified like everything else: ``hard-prompts`` optimises all tokens together,
    ``vocabulary-match`` takes the candidate with the nearest state, ``nearest-embedding`` and ``logit-lens``
    look at the states alone. ``proposers``: what ``fast`` ranks tokens by,
    names and proposer objects, or names separated by commas: ``lens`` (trained), ``codebook`` (fitted in
    closed form), ``peel`` (states carried down to the embeddings), ``prior`` (the model's own next-token
    prediction), ``gradient`` (SIPIT's descent, where the ranking failed), or what
    ``preimage.inversion.register_proposer`` made known. None: the best there is.
    ``lens``: the file of the lens to use, instead of those that come with the package or lie in the cache.

    >>> from preimage import InvertOptions
    >>> InvertOptions(proposers=("codebook", "prior"), timeout=10.0).to_dict()["proposers"]
    'codebook,prior'
    """

    observe: str | Observation | None = None  # what was seen; None: what the states say themselves
    prefix: str | Sequence[int] = ()  # known tokens or text before the first state that was seen
    method: str = "fast"
    proposers: str | tuple[str | Proposer, ...] | None = None
    lens: str | Path | None = None
    prove: bool = False  # try the whole vocabulary at every position of what was recovered: the exact margin
    seed: int = 0
    tolerance: float | None = None  # largest accepted distance, a share of |h_t|; None: from the noise floor
    max_tests: int | None = None  # verifier tests for one prompt; None: positions x vocabulary
    timeout: float | None = None  # seconds for one prompt
    learning_rate: float = 1.0  # of the gradient policy
    gradient_cap: float = 1.0  # its largest gradient norm
    snap_every: int = 50  # its proposals between two snaps of the proxy to a token
    patience: int | None = 512  # its proposals at one position before plain enumeration; None: never
    published_cost: bool = False  # SIPIT as published: no prefix cache, one candidate at a time, all blocks
    hard_prompts: HardPromptSettings = field(default_factory=HardPromptSettings)
    vocabulary_match: VocabularyMatchSettings = field(default_factory=VocabularyMatchSettings)

    def __post_init__(self) -> None:
        Observation.of(self.observe)  # which refuses what is unknown
        if self.method not in METHODS:
            raise OptionError(f"Method {self.method!r} is not known.", f"Use {', '.join(METHODS)}.")
        if self.prefix and self.method != "fast":
            raise OptionError(f"Method {self.method} takes no known prefix.", "Use the method fast.")
        if self.published_cost and self.method not in ("sipit", "brute-force"):
            raise OptionError("published_cost is SIPIT's or brute force's.", "Choose one of them as method.")
        if self.proposers is not None:
            self._check_proposers()
        if self.lens is not None:
            self._check_lens()
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name} is {value}.", "Give a number above 0.")
        if self.patience is not None and self.patience < 0:
            raise OptionError(f"patience is {self.patience}.", "Give 0 or more.")

    def _check_proposers(self) -> None:
        names, chosen = proposer_names(), self.chosen_proposers
        allowed = f"Use some of {', '.join(names)}, or objects with a name and a method score."
        if not chosen:
            raise OptionError("No proposer was given.", allowed)
        for one in chosen:
            usable = one in names if isinstance(one, str) else hasattr(one, "score") and hasattr(one, "name")
            if not usable:
                raise OptionError(f"Proposer {one!r} is not known.", allowed)
        if self.method != "fast":
            raise OptionError(f"Method {self.method} has its own order.", "Give proposers to fast alone.")
        if all(one == GRADIENT for one in chosen):
            raise OptionError("The gradient alone is SIPIT.", "Choose the method sipit.")

    def _check_lens(self) -> None:
        if not Path(self.lens or "").is_file():
            raise OptionError(f"There is no file {self.lens}.", "Check the path.")
        if self.method != "fast":
            raise OptionError(f"Method {self.method} uses no lens.", "Give a lens to fast alone.")
        if LENS not in self.chosen_proposers:
            raise OptionError(
                f"The lens {self.lens} was given, and proposers without lens.",
                "Add lens to the proposers, or leave them out.",
            )

    @property
    def chosen_proposers(self) -> tuple[str | Proposer, ...]:
        """The proposers that were chosen, or the lens that was given; none: the best there is."""
        if self.proposers is None and self.lens is not None:
            return (LENS,)
        if isinstance(self.proposers, str):
            return tuple(name.strip() for name in self.proposers.split(",") if name.strip())
        return tuple(self.proposers or ())

    def to_dict(self) -> dict[str, Any]:
        """Plain json types; proposers by their names, separated by commas."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.proposers is not None:
            names = (one if isinstance(one, str) else one.name for one in self.chosen_proposers)
            values["proposers"] = ",".join(names)
        values |= {name: asdict(values[name]) for name in ("hard_prompts", "vocabulary_match")}
        values["lens"] = None if self.lens is None else str(self.lens)
        values["observe"] = None if self.observe is None else Observation.of(self.observe).to_dict()
        values["prefix"] = self.prefix if isinstance(self.prefix, str) else list(self.prefix)
        return values
