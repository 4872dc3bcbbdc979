"""One prompt on its way through the fast engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.budget import Budget
from preimage.inversion.search import Outcome
from preimage.inversion.verifier import FAR, Target
from preimage.models import Prefix

_FAITHFUL = 16.0  # a token of the prompt, tried as a branch, may be so many times out of reach


@dataclass
class Job:
    """One prompt on its way."""

    index: int
    observed: Float[Tensor, "position d_model"]
    target: Target
    ids: Int[Tensor, " position"]  # the proposal; its first ``verified`` tokens are settled
    second: Int[Tensor, " position"]  # the next best everywhere
    budget: Budget
    make_prefix: Callable[[], Prefix]
    held: list[int] = field(default_factory=list)  # tokens of the cached prefix
    verified: int = 0
    refused: dict[int, dict[int, float]] = field(default_factory=dict)  # position -> token -> distance
    distances: list[float] = field(default_factory=list)
    runners_up: list[tuple[int, float]] = field(default_factory=list)  # the nearest other token everywhere
    possible: dict[int, list[tuple[int, float]]] = field(
        default_factory=dict
    )  # others that may fit, where any
    tests: list[int] = field(default_factory=list)  # tokens tested everywhere, once it is verified
    repairs: int = 0
    stage: int = 0  # rounds spent on the first mismatch
    plainly: bool = False  # whether only plain passes over the whole prompt are near enough to the states
    outcome: Outcome | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def affordable(self, end: int, rows: int = 1) -> Int[Tensor, " some"]:
        """The proposal up to a position, no longer than what so many rows of it may still test."""
        return self.ids[: min(end, self.verified + max(1, self.budget.tests_left // rows))]

    @cached_property
    def prefix(self) -> Prefix:
        """Where its mismatches are repaired."""
        return self.make_prefix()

    def extend_prefix(self, row: Int[Tensor, " position"], start: int) -> Float[Tensor, "some d_model"]:
        """Run a row from a position on, behind what the prefix holds up to there; the states of it."""
        self.prefix.crop(start)
        states = self.prefix.extend(row[start:])
        self.held = row.tolist()
        return states

    def prefix_at(self, length: int) -> Prefix:
        """The cached prefix, holding just the first tokens of the prompt."""
        wanted = self.ids[:length].tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(wanted, self.held, strict=False)) if a != b),
            min(length, len(self.held)),
        )
        self.prefix.crop(same)
        if same < length:
            self.prefix.extend(self.ids[same:length])
        self.held = wanted
        return self.prefix

    def faithful(self, places: Tensor, tokens: Tensor, distances: Tensor) -> bool:
        """Whether tokens of the prompt, tried as branches at their own positions, give their own states."""
        own = tokens == self.ids[places]
        reach = torch.tensor(self.target.reaches, dtype=torch.float64)[places]
        return bool((distances <= _FAITHFUL * reach)[own].all())

    def note_rivals(self, count: int, places: Tensor, tokens: Tensor, distances: Tensor) -> int | None:
        """Keep the nearest other token of every position; the first position where that is not far."""
        ids = self.ids[:count].tolist()
        others = [
            {other: away for other, away in self.refused.get(index, {}).items() if other != token}
            for index, token in enumerate(ids)
        ]
        for index, token, distance in zip(places.tolist(), tokens.tolist(), distances.tolist(), strict=True):
            if token != ids[index]:
                others[index][token] = distance
                self.budget.tests += 1
        self.tests = [1 + len(some) for some in others]
        self.runners_up = [min(some.items(), key=itemgetter(1), default=(-1, math.inf)) for some in others]
        reaches = self.target.reaches
        self.possible = {
            index: [(token, away) for token, away in some.items() if away <= reaches[index]]
            for index, some in enumerate(others)
            if self.runners_up[index][1] <= reaches[index]
        }
        for index, (token, distance) in enumerate(self.runners_up):
            if token < 0 or not distance >= FAR * reaches[index]:
                return index
        return None


def replaced(ids: Int[Tensor, " position"], at: int, token: int) -> Int[Tensor, " position"]:
    """The same ids with another token at one position."""
    row = ids.clone()
    row[at] = token
    return row
