"""How much of an item is run: small for two cores and minutes, full for one GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from preimage.errors import OptionError

PresetName: TypeAlias = Literal["small", "full"]
PRESETS: tuple[str, ...] = get_args(PresetName)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one run. What an item does not use it ignores.

    ``count`` prompts of ``length`` tokens. ``slow``: how much of what takes the longest: prompts of the slow
    methods, cut to ``slow_length`` tokens; prefixes that are continued; steps of a training. ``steps``: of
    HARDPROMPTS; None: the paper's budget. ``layers``: as everywhere. ``seconds``: what one prompt of a slow
    method may cost before it counts as not ended. ``source``: of the prompts, where the item does not say it.
    """

    count: int
    length: int
    layers: str = "all"
    slow: int = 0
    slow_length: int = 0
    steps: int | None = None
    seconds: float | None = None
    source: str = "default:prose:test"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "length"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}.", "Give 1 or more.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)
