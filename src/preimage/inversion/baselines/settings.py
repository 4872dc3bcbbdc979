"""Settings of the baselines that read a prompt in their own way. Quick to import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from preimage.errors import OptionError


@dataclass(frozen=True)
class HardPromptSettings:
    """HARDPROMPTS: PEZ (arXiv 2302.03668) with the squared distance of all states at once as its loss.

    ``steps``: None is the budget of arXiv 2510.15511, a quarter of positions times vocabulary. The optimiser,
    AdamW with this ``learning_rate`` and ``weight_decay``, is that of PEZ's public code.

    >>> HardPromptSettings().steps_for(positions=20, vocabulary=50_257)
    251285
    """

    steps: int | None = None
    learning_rate: float = 0.1
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.weight_decay < 0:
            raise OptionError(f"weight_decay is {self.weight_decay}.", "Give 0 or more.")
        _above_0(self, "steps", "learning_rate")

    def steps_for(self, positions: int, vocabulary: int) -> int:
        """Steps that a prompt may cost."""
        return self.steps or max(1, positions * vocabulary // 4)


@dataclass(frozen=True)
class VocabularyMatchSettings:
    """Vocabulary matching (arXiv 2505.18332): candidates as the model expects them, the nearest by L1.

    ``batch``: candidates run together on the cached prefix. ``threshold``: the L1 distance at which a
    position is settled and no further candidate is tried; None is what the noise floor allows, so that a
    token which fits is never passed over.
    """

    batch: int = 512
    threshold: float | None = None

    def __post_init__(self) -> None:
        _above_0(self, "batch", "threshold")


def _above_0(settings: Any, *names: str) -> None:
    known = {field.name for field in fields(settings)}
    for name in names:
        assert name in known
        value = getattr(settings, name)
        if value is not None and not value > 0:
            raise OptionError(f"{name} is {value}.", "Give a number above 0.")
