"""One pass over several prompts and what is tried beside them, begun before what it shows is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import fetch, send
from preimage.inversion.engine.jobs import Branches, Job
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.models import FEW_TOKENS, LanguageModel, states_of_branches

_WIDTH = 32  # branches in a row, at least: a prompt with more of them has several rows, so few are padded


class Nearest(NamedTuple):
    """The nearest of the rivals that were tried at every position of some prompts, and how many were."""

    tokens: Int[Tensor, "prompt position"]
    distances: Float[Tensor, "prompt position"]
    tests: Int[Tensor, "prompt position"]

    @classmethod
    def of(
        cls,
        which: Int[Tensor, " branch"],
        places: Int[Tensor, " branch"],
        tokens: Int[Tensor, " branch"],
        beside: Float[Tensor, " branch"],
        shape: tuple[int, int],
    ) -> Nearest:
        """Of branches, each of one of the prompts."""
        at, size = which * shape[1] + places, shape[0] * shape[1]
        distances = beside.new_full((size,), math.inf).scatter_reduce(0, at, beside, "amin")
        least = beside == distances[at]
        nearest = torch.full_like(distances, -1, dtype=torch.long)
        nearest[at[least]] = tokens[least]
        return cls(*(side.view(shape) for side in (nearest, distances, at.bincount(minlength=size))))

    def all_far(
        self,
        far: Float[Tensor, "prompt position"],
        radius: Float[Tensor, "prompt position"],
        away: Float[Tensor, "prompt position"],
        lengths: Sequence[int],
    ) -> list[bool]:
        """Which prompts fit everywhere, with a rival at every position that is far."""
        inside = torch.arange(away.shape[1]) < torch.tensor(lengths)[:, None]
        clear = (self.distances >= far) & torch.isfinite(self.distances) & (away <= radius)
        return (clear | ~inside).all(dim=1).tolist()

    def columns(self, row: int, length: int) -> tuple[list[int], list[float], list[int]]:
        """The nearest token of every position of one prompt, its distance, and how many were tried."""
        tokens, distances, tests = (side[row, :length].tolist() for side in self)
        return tokens, distances, tests


class SharedPass:
    """A pass over prompts and their branches; ``target`` is of all prompts, by their index."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        target: Target,
        jobs: Sequence[Job],
        branches: Sequence[Branches],
    ) -> None:
        self.jobs, self.branches, self._target, self._inside = jobs, branches, target, set(jobs)
        self._places, self._tokens = (torch.cat(column) for column in zip(*branches, strict=True))
        counts = torch.tensor([len(places) for places, _ in branches])
        self._which = torch.arange(len(jobs)).repeat_interleave(counts)
        ids = pad_sequence([job.ids for job in jobs], batch_first=True)
        most = max(1, int(counts.max()))
        at_once = len(jobs) * (ids.shape[1] + most) <= FEW_TOKENS
        width = most if at_once else min(most, max(_WIDTH, ids.shape[1] // 2))
        within = torch.arange(len(self._which)) - (counts.cumsum(0) - counts)[self._which]
        rows = torch.ones_like(counts) if at_once else -(-counts // width)
        row, column = (rows.cumsum(0) - rows)[self._which] + within // width, within % width
        places, tokens = torch.zeros(2, int(rows.sum()), width, dtype=torch.long)
        places[row, column], tokens[row, column] = self._places, self._tokens
        of, index = torch.arange(len(jobs)).repeat_interleave(rows), torch.tensor([job.index for job in jobs])
        here = [
            send(some, model.device)
            for some in (ids, places, tokens, of, index, index[self._which], self._places, row, column)
        ]
        ids, places, tokens, of, index, owner, at, row, column = here
        tap, length = verifier.tap, ids.shape[1]
        states = states_of_branches(model, tap, ids, places, tokens, None if at_once else of)
        trunk, rivals = map(verifier.observe, states)
        self._away = fetch(target.away(trunk, (index, slice(length))))
        self._beside = fetch(target.away(rivals[row, column], (owner, at)))

    def __contains__(self, job: Job) -> bool:
        return job in self._inside

    def results(self) -> tuple[list[bool], Nearest, list[list[float]], Sequence[Tensor]]:
        """Which prompts fit everywhere with rivals that are far, the nearest rivals; all distances.

        Of the tokens of every prompt, and of the branches of every prompt.
        """
        away, beside = self._away(), self._beside()
        nearest = Nearest.of(self._which, self._places, self._tokens, beside, (len(away), away.shape[1]))
        rows = [job.index for job in self.jobs]
        far, radius = (side[rows, : away.shape[1]] for side in (self._target.far, self._target.radius))
        whole = nearest.all_far(far, radius, away, [len(job) for job in self.jobs])
        return whole, nearest, away.tolist(), beside.split([len(places) for places, _ in self.branches])
