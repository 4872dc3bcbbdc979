"""How much is done at once, by the kind of device, and how much memory one has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Size = TypeVar("Size")
_MEMORY = Path("/proc/meminfo")
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}  # tokens that go through a model in one pass


def by_device(sizes: Mapping[str, Size], device: torch.device) -> Size:
    """The entry for this kind of device; a kind that is not listed is treated as a CPU."""
    return sizes.get(device.type, sizes["cpu"])


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; what gives the copy, and waits for nothing behind it."""
    if tensor.device.type != "cuda":
        return tensor.cpu
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def wait() -> Tensor:
        there.synchronize()
        return copy

    return wait


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had on a device now; None where the system does not tell."""
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # torch gives it again
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu" or not _MEMORY.exists():
        return None
    told = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    return 1024 * int(told["MemAvailable"].split()[0])
