"""States and prompt distances that tests of the geometry share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import preimage
from preimage.distances import PromptDistances
from preimage.states import States
from support.tiny import random_ids, tiny


def edits(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein's distance, by its definition."""
    row = list(range(len(other) + 1))
    for i, token in enumerate(one, start=1):
        before, row = row, [i]
        for j, second in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (token != second)))
    return row[-1]


def table(prompts: PromptDistances) -> Tensor:
    """The distances of all pairs."""
    every = torch.arange(len(prompts.lengths))
    return prompts.of(every.repeat_interleave(len(every)), every.repeat(len(every))).view(len(every), -1)


def captured(count: int = 30, length: int = 6) -> States:
    prompts = [random_ids(length, seed) for seed in range(count)]
    return preimage.capture(tiny("llama"), prompts, positions="last")
