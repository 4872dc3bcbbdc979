"""Weights that a library keeps as codes and scales, in a tensor class of its own: torchao's, for one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def is_coded(tensor: Tensor) -> bool:
    """Whether a tensor holds others that its numbers are computed from, as torch asks it of such classes."""
    return hasattr(tensor, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of; a plain one is its own only part."""
    if not is_coded(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # see above
        yield from parts_of(getattr(tensor, name))
