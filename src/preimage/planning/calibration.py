"""How fast this machine is at what the work consists of: a few passes and one small set of pairs, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from preimage.collisions.options import CollisionOptions
from preimage.collisions.spacing import RowLabels, measure_spacing
from preimage.devices import BATCH_TOKENS, by_device
from preimage.layers import Layer
from preimage.models import LanguageModel

_PASS = {"cpu": 4096, "cuda": 65536}  # tokens of the pass that is timed
_ROWS = {"cpu": (256, 1024), "cuda": (2048, 16384)}  # rows of the two sets of pairs
_SMALL = 64  # tokens of the pass that tells what a small one costs


@dataclass(frozen=True)
class Calibration:
    """Seconds, measured now.

    ``per_token``: of a large pass that keeps ``layers``; ``small_pass``: of 64 tokens; ``per_set`` and
    ``per_pair``: what comparing one layer's states costs at all, and for every pair.
    """

    device: str
    load_seconds: float
    per_token: float
    small_pass: float
    per_set: float
    per_pair: float

    def layer(self, rows: int) -> float:
        """Comparing all pairs of so many states."""
        return self.per_set + self.per_pair * rows * (rows - 1) / 2

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


def calibrate(
    model: LanguageModel, layers: Sequence[Layer], length: int, rows: int, load_seconds: float
) -> Calibration:
    """Time a pass over random prompts of this length, a small one, and pairs of ``rows`` states at most."""
    device = model.device
    tokens = min(by_device(_PASS, device), by_device(BATCH_TOKENS, device), rows * length)
    count = max(1, tokens // length)
    ids = torch.randint(model.vocab_size, (count, length), generator=torch.Generator().manual_seed(0))
    small = ids[:1, : min(length, _SMALL)]
    taps = tuple(layers)
    model.states(small, taps)  # the first pass also fills caches
    small_pass = _timed(lambda: _kept(model, small, taps), 3)
    large = _timed(lambda: _kept(model, ids, taps), 1)
    few, many = (min(size, max(2, rows)) for size in by_device(_ROWS, device))
    one, other = (_timed(partial(_compared, model, size), 2) for size in (few, many))
    pairs = [size * (size - 1) / 2 for size in (few, many)]
    per_pair = max(0.0, (other - one) / (pairs[1] - pairs[0])) if many > few else one / pairs[0]
    return Calibration(
        device=device.type,
        load_seconds=load_seconds,
        per_token=large / ids.numel(),
        small_pass=small_pass * _SMALL / small.numel(),
        per_set=max(0.0, one - per_pair * pairs[0]),
        per_pair=per_pair,
    )


def _timed(work: Callable[[], object], times: int) -> float:
    """The shortest of some runs: what others do at the same time only adds to it."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _kept(model: LanguageModel, ids: torch.Tensor, layers: tuple[Layer, ...]) -> None:
    for states in model.states(ids, layers).values():
        states[:, -1:].cpu()


def _compared(model: LanguageModel, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, model.d_model, generator=generator).to(model.device)
    labels = RowLabels(
        ids=lambda row: (row,), text=lambda row: None, key=lambda row: row, explain=lambda a, b, near: ""
    )
    measure_spacing(states, 1e-6, labels, CollisionOptions())
