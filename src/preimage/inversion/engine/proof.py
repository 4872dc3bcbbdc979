"""Proof of an inversion: the whole vocabulary at every position of a recovered prompt.

D(prefix, t) = min over v != v_t of |F(v; prefix, t) - F(v_t; prefix, t)| is how far the state of any other
token stays away. A state changed by less than D / 2 is still nearest to the state of its own token. Where
another token comes within reach, a search with the whole vocabulary everywhere decides anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import row_distances
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.policies import RankedPolicy
from preimage.inversion.engine.search import Fit, Frame, Outcome, Search
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.result import Inversion, Position
from preimage.models import LanguageModel, Prefix
from preimage.progress import Progress


def prove(
    model: LanguageModel, result: Inversion, target: Target, verifier: Verifier, progress: Progress
) -> tuple[Inversion, bool]:
    """The result with margin, runner-up and tolerated noise at every verified position.

    And whether the proof holds: at no position can a token fit that is not the verified one or its twin.
    """
    ids = result.token_ids
    prefix = model.prefix(verifier.tap)
    positions: list[Position] = []
    before, holds = model.forward_tokens, True
    for index, (token, position) in enumerate(zip(ids, result.positions, strict=False)):
        progress(index, len(ids), "positions proved")
        apart, seen = _scan(model, prefix, token, target[index], verifier)
        twins = list(lookalikes_of(model).twins(token))
        in_reach = seen <= target.reaches[index]
        in_reach[[token, *twins]] = False
        holds = holds and not bool(in_reach.any())
        apart[token] = torch.inf
        rival = int(apart.argmin())
        margin = float(apart[rival])
        positions.append(
            position._replace(
                runner_up_id=rival,
                runner_up_distance=float(seen[rival]),
                tests=model.vocab_size,
                margin=margin,
                tolerated_noise=margin / 2,
            )
        )
        prefix.extend(torch.tensor([token]))
    progress(len(ids), len(ids), "positions proved")
    margins = [position.margin for position in positions if position.margin is not None]
    proved = replace(
        result,
        positions=(*positions, *result.positions[len(ids) :]),
        margin=min(margins, default=None),
        tests=sum(position.tests for position in positions),
        forward_tokens=result.forward_tokens + model.forward_tokens - before,
    )
    return proved, holds


def search_everywhere(
    model: LanguageModel, result: Inversion, target: Target, verifier: Verifier, timeout: float | None
) -> Outcome:
    """Every prompt that fits beside the recovered one, the whole vocabulary tried at every position."""
    lookalikes = lookalikes_of(model)
    known = [Frame(Fit(position, lookalikes.twins(position.token_id))) for position in result.positions]
    prefix = model.prefix(verifier.tap)
    budget = Budget(len(target) * model.vocab_size, timeout)

    def policy(_: int) -> RankedPolicy:
        return RankedPolicy(torch.arange(model.vocab_size), model.vocab_size, prefix.max_candidates)

    return Search(target, prefix, verifier, policy, lookalikes, budget, exhaustive=True).run(fitting=known)


def _scan(
    model: LanguageModel, prefix: Prefix, token: int, target: Target, verifier: Verifier
) -> tuple[Float[Tensor, " vocabulary"], Float[Tensor, " vocabulary"]]:
    """How far every token's state is from the verified token's, and from what was observed."""
    own = verifier.observe(prefix.try_tokens(torch.tensor([token])))[0]
    apart = torch.empty(model.vocab_size, dtype=torch.float64)
    seen = torch.empty(model.vocab_size, dtype=torch.float64)
    for chunk in torch.arange(model.vocab_size).split(prefix.max_candidates):
        states = verifier.observe(prefix.try_tokens(chunk))
        apart[chunk] = row_distances(states, own).cpu()
        seen[chunk] = target.away(states).cpu()
    return apart, seen
