"""Clocks and what they ran on."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from preimage.models import LanguageModel
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


def plain_forward(model: LanguageModel, ids: Sequence[Sequence[int]]) -> None:
    """What everything is compared with: the model's own backbone, all blocks, no LM head, nothing kept."""
    with torch.inference_mode():
        model.anatomy.backbone(torch.tensor([list(row) for row in ids], device=model.device), use_cache=False)


def hardware(model: LanguageModel) -> dict[str, Any]:
    """What a speed was measured on."""
    return hardware_of(model.device)


def hardware_of(device: torch.device) -> dict[str, Any]:
    """The same for a device."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
