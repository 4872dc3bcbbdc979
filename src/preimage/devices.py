"""How much is done at once, by the kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Size = TypeVar("Size")
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}  # tokens that go through a model in one pass


def by_device(sizes: Mapping[str, Size], device: torch.device) -> Size:
    """The entry for this kind of device; a kind that is not listed is treated as a CPU."""
    return sizes.get(device.type, sizes["cpu"])
