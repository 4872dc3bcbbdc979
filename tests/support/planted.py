"""A proposer that is wrong where it is told to be, and the fast engine run with it."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.search import Outcome
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.scores import Keys, Part, Scores
from preimage.models import LanguageModel
from preimage.states import noise_of

VOCABULARY = 5000  # more than is tried in full


class Planted:
    """Ranks the right token first, but at some positions of some prompts so many others before it."""

    name = "planted"

    def __init__(self, prompts: list[list[int]], ranks: Mapping[int, int], sure: float = 2.0) -> None:
        self._prompts, self._ranks, self._sure = prompts, ranks, sure

    def score(self, observed: Tensor, valid: Tensor) -> Scores:
        rows = torch.zeros(*valid.shape, VOCABULARY)
        for row, ids in zip(rows, self._prompts, strict=True):
            for at, token in enumerate(ids):
                rank = self._ranks.get(at, 0)
                others = [(token + 1 + step) % VOCABULARY for step in range(rank)]
                row[at, others] = 20.0 - torch.arange(float(rank)) * 1e-3
                row[at, token] = 20.0 - rank * 1e-3
                if not rank:
                    row[at, token] += self._sure
        return Scores(
            (Part(rows.flatten(0, 1), (Keys(torch.eye(VOCABULARY), torch.zeros(VOCABULARY)),)),),
            valid.shape[1],
        )


def run(
    model: LanguageModel, proposer: Planted, states: list[Tensor], together: bool
) -> tuple[list[Outcome], int]:
    """The outcomes, and how many passes over blocks they took."""
    passes, original = 0, type(model).run

    def counted(self: LanguageModel, *args: object, **given: object) -> object:
        nonlocal passes
        passes += tuple(given["layers"]) != (0,)  # type: ignore[arg-type]  # what enters block 1 is no pass
        return original(self, *args, **given)

    checker = Verifier(model, 2, noise=noise_of(model, (2,))[2])
    engine = FastInverter(model, checker, proposer, together=together)
    engine.prepare(max(map(len, states)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "run", counted)
        found = engine.run(states, [Budget(len(one) * VOCABULARY, None) for one in states])
    return found, passes


def ids_of(outcome: Outcome) -> list[int]:
    return [fit.position.token_id for fit in outcome.partial]


def states_of(model: LanguageModel, prompts: list[list[int]]) -> list[Tensor]:
    return [model.states(torch.tensor([ids]), (2,))[2][0] for ids in prompts]
