"""Candidates tried at one position: how far they are, and the states of the nearest."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_KEPT = 64  # states, of every batch


class Trial:
    """What was tried at a position so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.distances: Float[Tensor, " candidate"] = torch.empty(0, dtype=torch.float64)
        self._states: dict[int, Float[Tensor, " d"]] = {}

    def add(
        self, tokens: list[int], distances: Float[Tensor, " candidate"], states: Float[Tensor, "candidate d"]
    ) -> None:
        """Take in a batch of candidates."""
        self.tokens += tokens
        self.distances = torch.cat([self.distances, distances.double()])
        for index in distances.argsort()[:_KEPT].tolist():
            self._states[tokens[index]] = states[index].clone()

    @property
    def nearest(self) -> int:
        """The nearest of all."""
        return self.tokens[int(self.distances.argmin())]

    def state(self, token: int) -> Float[Tensor, " d"]:
        """The state of a token; of one far off, that of the nearest of all."""
        return self._states.get(token, self._states[self.nearest])
