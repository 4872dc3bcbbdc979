"""Options of a collision search; the same object serves Python, the command line and the saved json."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from preimage.errors import OptionError

PUBLISHED = 1e-6  # the line drawn in arXiv 2510.15511; it lies below the noise of most layers


@dataclass(frozen=True)
class CollisionOptions:
    """What is counted and listed.

    ``thresholds``: distances, in units of a state, under which pairs are counted, beside the published 1e-6;
    one below the noise of a chosen layer is refused, because such a count would mean nothing. ``closest``:
    how many of the closest pairs are listed. ``hard_bases``: prompts from which hard pairs are made; 0 for
    none. ``seed``: of the choice of these.

    >>> CollisionOptions(thresholds=(0.01,), hard_bases=0).to_dict()
    {'thresholds': [0.01], 'closest': 10, 'hard_bases': 0, 'seed': 0}
    """

    thresholds: tuple[float, ...] = ()
    closest: int = 10
    hard_bases: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for value in self.thresholds:
            if not (value > 0 and math.isfinite(value)):
                raise OptionError(f"A threshold is {value}.", "Give distances above 0.")
        for name, least in (("closest", 1), ("hard_bases", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}.", f"Give {least} or more.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"thresholds": list(self.thresholds)}


class CollisionChanges(TypedDict, total=False):
    """Single fields of :class:`CollisionOptions`, as keyword arguments."""

    thresholds: tuple[float, ...]
    closest: int
    hard_bases: int
    seed: int
