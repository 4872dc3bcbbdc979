"""Clocks and what they ran on."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.storage import processor


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one run, everything on the device finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def take_turns(
    sides: tuple[Callable[[], object], Callable[[], object]],
    rounds: int,
    device: torch.device,
    progress: Progress = silent,
) -> list[tuple[float, float]]:
    """Seconds of both sides in every round, once both have warmed up; neither always runs second."""
    for side in sides:
        side()
    pairs = []
    for turn in range(rounds):
        took = {side: seconds(side, device) for side in (sides if turn % 2 == 0 else sides[::-1])}
        pairs.append((took[sides[0]], took[sides[1]]))
        progress(turn + 1, rounds, "rounds")
    return pairs


def plain_forward(model: LanguageModel, ids: Sequence[Sequence[int]], size: int = 1) -> None:
    """What everything is compared with: the model's own backbone, all blocks, no LM head, nothing kept.

    ``size`` prompts, all of one length, share a pass.
    """
    with torch.inference_mode():
        for start in range(0, len(ids), size):
            rows = torch.tensor([list(row) for row in ids[start : start + size]], device=model.device)
            model.anatomy.backbone(rows, use_cache=False)


def hardware(device: torch.device) -> dict[str, Any]:
    """What a speed was measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
