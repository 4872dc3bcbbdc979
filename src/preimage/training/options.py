"""Options of the trainings. Quick to import: wrong ones are refused before torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from preimage.errors import OptionError
from preimage.models import FAMILIES, parse_size
from preimage.prompts.prompt_set import check_whole

_RATE, _WIDTH = 1e-3, 128


@dataclass(frozen=True)
class TrajectoryOptions:
    """What is trained, and when and on what it is measured.

    ``size``: a preset, or (d_model, n_layers, n_heads). Each of ``steps`` takes ``batch`` windows of
    ``window`` tokens. ``learning_rate``: the highest; None is 1e-3 at width 128, falling with the root of the
    width. ``checkpoints``: how many times to measure, the beginning and the end included. ``probes`` prompts
    of ``length`` tokens are measured, the same at every checkpoint and in every run on the same text.
    ``bits``: as in ``GeometryOptions``. ``tf32``: allow such products in training, on a GPU.
    """

    family: str = "gpt2"  # or llama
    size: str | tuple[int, ...] = "small"
    steps: int = 600
    batch: int = 16
    window: int = 128
    learning_rate: float | None = None
    checkpoints: int = 12
    probes: int = 1000
    length: int = 32
    vocabulary: int = 4096
    bits: tuple[int | None, ...] = (None,)
    tf32: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise OptionError(f"Family {self.family!r} is not known.", f"Use one of {', '.join(FAMILIES)}.")
        parse_size(self.size)
        smallest = {"steps": 1, "batch": 1, "window": 2, "checkpoints": 2, "probes": 2, "length": 1,
                    "vocabulary": 258, "seed": 0}  # fmt: skip
        for name, least in smallest.items():
            check_whole(name, getattr(self, name), at_least=least)
        if self.seed >= 2**32:
            raise OptionError(f"seed is {self.seed}.", "Give less than 2^32.")
        if self.learning_rate is not None and not 0 < self.learning_rate <= 1:
            raise OptionError(f"learning_rate is {self.learning_rate}.", "Give more than 0, at most 1.")
        if self.checkpoints > self.steps + 1:
            raise OptionError(
                f"{self.checkpoints} checkpoints do not fit into {self.steps} steps.",
                f"Give at most {self.steps + 1} checkpoints, or more steps.",
            )

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return self.learning_rate or _RATE * (_WIDTH / parse_size(self.size).d_model) ** 0.5

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        size = self.size if isinstance(self.size, str) else list(self.size)
        return asdict(self) | {"size": size, "learning_rate": self.rate, "bits": list(self.bits)}


@dataclass(frozen=True)
class LensOptions:
    """How a lens is trained.

    Half of every batch is text, a quarter text in which some tokens are replaced by random ones, the rest
    uniformly random tokens; without text all of it is. ``neighbours``: states before and after a position
    that the lens sees; where little is seen of each, as of the keys of a few heads, more of them help.
    ``key_hidden``: keys are made of embeddings alone, through a hidden layer so wide, and not of token
    features, which take a pass of the vocabulary; 0: of these. ``prior``: whether what the model expects
    behind the position before is added, weighted position by position; None: near the top of the model.
    ``batch_tokens``: tokens a step; None: 8,192 on a GPU, 2,048 on a CPU. ``sampled_tokens``: how much the
    model writes to be trained on, where it does; None: 4,000,000 on a GPU, 100,000 on a CPU.
    """

    steps: int = 1200
    batch_tokens: int | None = None
    length: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    rank: int = 512
    hidden: int = 2304
    neighbours: int = 1
    key_hidden: int = 0
    prior: bool | None = None
    sampled_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        smallest = dict.fromkeys(("steps", "length", "rank", "hidden"), 1)
        for name, least in (smallest | dict.fromkeys(("neighbours", "key_hidden", "seed"), 0)).items():
            check_whole(name, getattr(self, name), at_least=least)
        for name in ("batch_tokens", "sampled_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), at_least=1)
        if not 0 < self.learning_rate <= 1:
            raise OptionError(f"learning_rate is {self.learning_rate}.", "Give more than 0, at most 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


def checkpoint_steps(steps: int, count: int) -> tuple[int, ...]:
    """0, then ``count`` - 1 whole steps in equal ratios from 1 to ``steps``, each once."""
    moments = [0]
    for place in range(count - 1):
        even = 1.0 if count == 2 else place / (count - 2)
        moments.append(max(moments[-1] + 1, round(steps**even)))
    return tuple(moments)
