"""Proof of an inversion: the whole vocabulary at every position of a recovered prompt.

D(prefix, t) = min over v != v_t of |F(v; prefix, t) - F(v_t; prefix, t)| is how far the state of any other
token stays away. A state changed by less than D / 2 is still nearest to the state of its own token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import row_distances
from preimage.inversion.verifier import Verifier
from preimage.models import LanguageModel
from preimage.progress import Progress
from preimage.results import Inversion, Position


def prove(
    model: LanguageModel,
    result: Inversion,
    observed: Float[Tensor, "position d"],
    verifier: Verifier,
    progress: Progress,
) -> Inversion:
    """The result with margin, runner-up and tolerated noise at every verified position."""
    ids = result.token_ids
    prefix = model.prefix(verifier.layer)
    positions: list[Position] = []
    before = model.forward_tokens
    for index, (token, position) in enumerate(zip(ids, result.positions, strict=False)):
        progress(index, len(ids), "positions proved")
        own = verifier.observe(prefix.try_tokens(torch.tensor([token])))[0]
        apart = torch.empty(model.vocab_size, dtype=torch.float64)
        seen = torch.empty(model.vocab_size, dtype=torch.float64)
        for chunk in torch.arange(model.vocab_size).split(prefix.max_candidates):
            states = verifier.observe(prefix.try_tokens(chunk))
            apart[chunk] = row_distances(states, own).cpu()
            seen[chunk] = row_distances(states, observed[index].to(states.device)).cpu()
        apart[token] = seen[token] = torch.inf
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
    return replace(
        result,
        positions=(*positions, *result.positions[len(ids) :]),
        margin=min(margins, default=None),
        tests=sum(position.tests for position in positions),
        forward_tokens=result.forward_tokens + model.forward_tokens - before,
    )
