"""The plan of some work: its stages, and what they cost on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from preimage.markup import Markup
from preimage.storage import Saved
from preimage.views import Shown, table

_RAY_SECONDS = 8.0  # until a cluster of this machine is there, and its workers have imported what they need


@dataclass(frozen=True)
class Stage:
    """Pieces of equal work.

    ``seconds``: of one piece, done with everything this machine computes with. ``serial``: done by whoever
    drives, while workers wait.
    """

    name: str
    pieces: int
    seconds: float
    serial: bool = False

    def on(self, workers: int, speed: float) -> float:
        """Seconds on so many workers, each of so much of this machine's speed."""
        if self.serial:
            return self.pieces * self.seconds
        return math.ceil(self.pieces / max(1, workers)) * self.seconds / speed


@dataclass(frozen=True, repr=False)
class WorkPlan(Saved, Shown):
    """What work would cost.

    ``pairs``: distances of all layers together. ``memory_bytes``: what one worker has at most,
    ``disk_bytes``: what is in the run folder at most. ``seconds``: in one process of this machine;
    ``seconds_on``: by the number of workers, each with a machine like this one; ``seconds_here``: of a
    cluster of ``workers`` that share this machine. ``calibration``: what was measured for it now.
    """

    _kind = "plan"

    command: str
    model: str
    stages: tuple[Stage, ...]
    forward_tokens: int
    pairs: int
    memory_bytes: int
    disk_bytes: int
    workers: int
    device: str
    load_seconds: float
    calibration: dict[str, Any]

    @property
    def seconds(self) -> float:
        """In one process."""
        return self.load_seconds + sum(stage.on(1, 1.0) for stage in self.stages)

    @property
    def seconds_on(self) -> dict[int, float]:
        """By the number of workers, each with a machine of its own like this one."""
        counts = sorted({1, 2, 4, 8, 16, 64, self.workers})
        start = 2 * self.load_seconds + _RAY_SECONDS
        return {count: start + sum(stage.on(count, 1.0) for stage in self.stages) for count in counts}

    @property
    def seconds_here(self) -> float:
        """Of a cluster of all workers on this machine, whose cores they share; a GPU is one worker's."""
        shared = 1.0 if self.device == "cuda" else 1 / max(1, self.workers)
        start = self.load_seconds * (1 + self.workers * shared) + _RAY_SECONDS
        return start + sum(stage.on(self.workers, shared) for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {
            "seconds": self.seconds, "seconds_here": self.seconds_here, "seconds_on": self.seconds_on,
        }  # fmt: skip

    def _line(self) -> str:
        return f"a plan of {self.command} on {self.model}: {self.seconds:,.0f} s in one process here"

    def _parts(self) -> Iterable[Markup]:
        yield table([asdict(stage) for stage in self.stages])
        amounts = {"forward_tokens": self.forward_tokens, "pairs": self.pairs,
                   "memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}  # fmt: skip
        yield table([amounts])
        yield table([{f"{count} workers": seconds for count, seconds in self.seconds_on.items()}], "Seconds")
