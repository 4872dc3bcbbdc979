"""Which prompt's states lie where: prompts of equal length form a group, one tensor a layer and group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from preimage.errors import StatesError
from preimage.layers import Layer

KeptPositions: TypeAlias = Literal["all", "last"]


@dataclass(frozen=True)
class Group:
    """Prompts of one length; row r of the group's tensors belongs to prompt ``prompts[r]``."""

    length: int
    prompts: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return {"length": self.length, "prompts": list(self.prompts)}


@dataclass(frozen=True)
class Layout:
    """Groups in ascending length, the layers kept, and whether every position or only the last is."""

    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    positions: KeptPositions
    d_model: int

    @property
    def count(self) -> int:
        """Number of prompts."""
        return sum(len(group.prompts) for group in self.groups)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            prompt: (index, row)
            for index, group in enumerate(self.groups)
            for row, prompt in enumerate(group.prompts)
        }

    def place(self, prompt: int) -> tuple[int, int]:
        """(group, row) of a prompt."""
        if prompt not in self._places:
            raise StatesError(
                f"There is no prompt {prompt}.", f"These states hold prompts 0..{self.count - 1}."
            )
        return self._places[prompt]

    def shape(self, group: int) -> tuple[int, int, int]:
        """Rows x kept positions x width of a group's tensors."""
        entry = self.groups[group]
        kept = entry.length if self.positions == "all" else 1
        return len(entry.prompts), kept, self.d_model

    def names(self) -> dict[str, tuple[int, int, int]]:
        """Name and shape of every tensor of a bundle."""
        return {
            tensor_name(layer, group): self.shape(group)
            for layer in self.layers
            for group in range(len(self.groups))
        }

    def elements(self) -> int:
        """Numbers stored in all."""
        return sum(rows * kept * width for rows, kept, width in self.names().values())


def tensor_name(layer: Layer, group: int) -> str:
    """Name of a tensor in ``states.safetensors``."""
    return f"layer.{layer}.group.{group}"


def group_by_length(lengths: Sequence[int]) -> tuple[Group, ...]:
    """Prompts bucketed by length, so that nothing is ever padded."""
    members: dict[int, list[int]] = {}
    for prompt, length in enumerate(lengths):
        members.setdefault(length, []).append(prompt)
    return tuple(Group(length, tuple(members[length])) for length in sorted(members))
