"""HARDPROMPTS: all tokens of a prompt optimised together (PEZ), as arXiv 2510.15511 compares itself with.

Continuous embeddings are projected to the nearest tokens at every step; the gradient is taken there and
applied to what was projected. What comes out is the projection with the smallest loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from preimage.inversion.baselines.settings import HardPromptSettings
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.models import LanguageModel

_TOGETHER = 2**25  # similarities held at a time


class Guess(NamedTuple):
    """What a baseline reads: a token a position, and why it stopped early, if it did."""

    token_ids: tuple[int, ...]
    stopped: str = ""


def optimised(
    model: LanguageModel,
    observed: Float[Tensor, "position d"],
    target: Target,
    verifier: Verifier,
    settings: HardPromptSettings,
    budget: Budget,
    generator: torch.Generator,
) -> Guess:
    """The tokens whose states are nearest to all that was observed, among those the descent came by.

    Cost: a pass forwards and one backwards over the prompt, and a product of its positions with the
    vocabulary, for each of ``settings.steps_for(...)`` steps; fewer where a projection fits everywhere.
    """
    table = model.embedding_table
    directions = normalize(table.float(), dim=-1)
    wanted = observed.to(model.device)
    start = torch.randint(model.vocab_size, (len(observed),), generator=generator)
    proxy = table[start.to(table.device)].float().requires_grad_(True)
    descent = torch.optim.AdamW([proxy], lr=settings.learning_rate, weight_decay=settings.weight_decay)
    best, least = tuple(start.tolist()), math.inf
    for _ in range(settings.steps_for(len(observed), model.vocab_size)):
        try:
            budget.check(0)
        except BudgetSpentError as spent:
            return Guess(best, str(spent))
        ids = nearest_rows(proxy.detach(), directions)
        with torch.enable_grad():
            projected = table[ids].detach().requires_grad_(True)
            states = model.run(embeddings=projected[None], layers=(verifier.tap,))[verifier.tap]
            seen = verifier.observe(states)[0]
            loss = (seen.float() - wanted.to(seen.device).float()).square().mean()
            (gradient,) = torch.autograd.grad(loss, projected)
        if float(loss.detach()) < least:
            best, least = tuple(ids.tolist()), float(loss.detach())
            away = target.away(seen.detach()).tolist()
            if all(one <= radius for one, radius in zip(away, target.radii, strict=True)):
                break
        proxy.grad = gradient.float()
        descent.step()
    return Guess(best)


def nearest_rows(
    rows: Float[Tensor, "position d"], directions: Float[Tensor, "vocabulary d"]
) -> Int[Tensor, " position"]:
    """For each row the token whose embedding points most nearly the same way."""
    few = max(1, _TOGETHER // len(directions))
    turned = normalize(rows.float(), dim=-1).to(directions)
    return torch.cat([(part @ directions.T).argmax(dim=-1) for part in turned.split(few)])
