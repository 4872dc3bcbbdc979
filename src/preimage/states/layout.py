"""Which prompt's states lie where: prompts of equal length form a group, one tensor a layer and group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from preimage.errors import StatesError
from preimage.layers import Layer

# Every position of a prompt, its last alone, or the mean over all of them: one vector a prompt.
KeptPositions: TypeAlias = Literal["all", "last", "mean"]


class Group(NamedTuple):
    """Prompts of one length; row r of the group's tensors belongs to prompt ``prompts[r]``.

    The length is 0 where one vector is all that is known of a prompt.
    """

    length: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Groups in ascending length, the layers kept, and whether every position or one vector a prompt is."""

    groups: tuple[Group, ...]
    layers: tuple[Layer, ...]
    positions: KeptPositions
    d_model: int

    @property
    def count(self) -> int:
        """Number of prompts."""
        return sum(len(group.prompts) for group in self.groups)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length in tokens of every prompt."""
        lengths = {prompt: group.length for group in self.groups for prompt in group.prompts}
        return tuple(lengths[prompt] for prompt in range(self.count))

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

    def names(self) -> dict[str, tuple[int, int, int]]:
        """Name and shape of every tensor of a bundle: rows x kept positions x width."""
        whole = self.positions == "all"
        return {
            tensor_name(layer, index): (len(group.prompts), group.length if whole else 1, self.d_model)
            for layer in self.layers
            for index, group in enumerate(self.groups)
        }


def tensor_name(layer: Layer, group: int) -> str:
    """Name of a tensor in ``states.safetensors``."""
    return f"layer.{layer}.group.{group}"


def group_by_length(lengths: Sequence[int]) -> tuple[Group, ...]:
    """Prompts bucketed by length, so that nothing is ever padded."""
    members: dict[int, list[int]] = {}
    for prompt, length in enumerate(lengths):
        members.setdefault(length, []).append(prompt)
    return tuple(Group(length, tuple(members[length])) for length in sorted(members))
