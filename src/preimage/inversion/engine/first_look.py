"""A first look at states: what is proposed for them, and how much white noise a pass over that shows.

White noise is weighted down along the directions in which states hardly differ, and tokens are proposed anew,
until that shows nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.inversion.engine.asking import Asking, Branches
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.evidence import Noise, noise_of_residual
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.scores import Scores
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.proposers.statistics import Statistics

_LOOKS = 3  # times that noise is weighted down and measured anew


class Proposals(NamedTuple):
    """What a proposer says of one prompt."""

    scores: Scores
    ids: Int[Tensor, " position"]  # its first choice, or what stands there in any case
    second: Int[Tensor, " position"]


class FirstLook(NamedTuple):
    """What a first look shows; ``noise`` None: no white noise."""

    proposals: Proposals
    noise: Noise | None = None
    away: float = 0.0  # how far the states are off what is proposed: median relative distance


def propose(proposer: Proposer, states: Float[Tensor, "position d"], given: Sequence[int]) -> Proposals:
    """The first and second choice everywhere, behind tokens that are given."""
    valid = torch.ones(1, len(states), dtype=torch.bool, device=states.device)
    scores = proposer.score(states[None], valid)
    first, second = (tokens[0].cpu() for tokens in scores.best_two())
    ids = first.clone()
    ids[: len(given)] = torch.tensor(given, dtype=first.dtype)
    return Proposals(scores, ids, torch.where(ids == first, second, first))


def first_look(
    observed: Float[Tensor, "position d"],
    verifier: Verifier,
    proposer: Proposer,
    statistics: Statistics,
    sinks: Bool[Tensor, " position"],
    known: Sequence[int],
    fitting: Sequence[int],
    budget: Budget,
) -> Asking[FirstLook]:
    """Passes over what is proposed, and over what is proposed without the noise they show.

    ``fitting``: first tokens that fit, as known ones do, where others may too.
    """
    given = [*known, *fitting[len(known) :]]
    found = propose(proposer, observed.float(), given)
    ordinary = ~sinks
    ordinary[: len(known)] = False
    if len(fitting) == len(observed) or not bool(ordinary.any()):  # what fits has no noise
        return FirstLook(found)
    lengths = observed[ordinary].double().norm(dim=1).clamp_min(1e-30)

    def measure(proposals: Proposals) -> Asking[FirstLook]:
        none = torch.empty(0, dtype=torch.long)
        states, _ = yield Branches(proposals.ids, 0, none, none)
        residual = (observed.double() - verifier.observe(states).double())[ordinary]
        noise = noise_of_residual(statistics.coordinates(residual), lengths, float(statistics.tilt))
        away = float((residual.norm(dim=1) / lengths).median())
        return FirstLook(proposals, noise, away)

    try:
        budget.check()
    except BudgetSpentError:
        return FirstLook(found)
    look = yield from measure(found)
    for _ in range(_LOOKS):
        if look.noise is None or not look.noise.white:
            break
        calm = statistics.denoised(observed.float(), look.noise.relative)
        again = propose(proposer, torch.where(sinks[:, None], observed.float(), calm), given)
        if again.ids.equal(look.proposals.ids):  # what they show is known, and no further look shows more
            look = look._replace(proposals=again)
            break
        nearer = yield from measure(again)
        if nearer.away > look.away:
            break
        look = nearer
    return look if look.noise is None or look.noise.white else look._replace(noise=None)
