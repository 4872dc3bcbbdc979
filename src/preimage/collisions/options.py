"""Options of a collision search; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from preimage.errors import OptionError

PUBLISHED = 1e-6  # the line drawn in arXiv 2510.15511; it lies below the noise of most layers


@dataclass(frozen=True)
class CollisionOptions:
    """What is counted and listed.

    ``thresholds``: distances under which pairs are counted, beside the published 1e-6; one below the noise
    floor of a chosen layer is refused, because such a count would mean nothing. ``closest``: how many of the
    closest pairs are listed. ``hard_bases``: prompts from which hard pairs are made; 0 for none.
    """

    thresholds: tuple[float, ...] = ()
    closest: int = 10
    hard_bases: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for value in self.thresholds:
            if not (value > 0 and math.isfinite(value)):
                raise OptionError(f"A threshold is {value}.", "Give distances above 0.")
        if self.closest < 1:
            raise OptionError(f"closest is {self.closest}.", "Give at least 1.")
        if self.hard_bases < 0:
            raise OptionError(f"hard_bases is {self.hard_bases}.", "Give 0 or more.")
        if self.seed < 0:
            raise OptionError(f"seed is {self.seed}.", "Give 0 or more.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"thresholds": list(self.thresholds)}
