"""How much is done at once, by the kind of device, how much memory one has, and how not to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
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


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; on its way to a GPU, without waiting for what is done there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU; what gives the copy, and waits for nothing behind it."""
    if tensor.device.type != "cuda":
        return tensor.cpu
    import torch

    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    there = torch.cuda.current_stream(tensor.device).record_event()  # of its own GPU, whichever is current

    def wait() -> Tensor:
        there.synchronize()
        return copy

    return wait


class Aside:
    """Work on a GPU that waits for what was begun there before this was made, and for nothing later."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begun = device, None
        if device.type == "cuda":
            import torch

            self._begun = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Inside, what is asked of the device is done so; on a CPU, at once."""
        if self._begun is None:
            yield
            return
        import torch

        beside = _beside(self._device)
        beside.wait_event(self._begun)
        with torch.cuda.stream(beside):
            yield


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)


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
