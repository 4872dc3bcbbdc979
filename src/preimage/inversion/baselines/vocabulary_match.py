"""Vocabulary matching (arXiv 2505.18332): position by position, the candidate with the nearest state.

Candidates come as the model expects them behind what was read so far, in batches on the cached prefix; the
first batch with one within the threshold ends a position. Distances are L1, as published; whether the prompt
is right is decided by the verifier, like everything else.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import city_block
from preimage.inversion.baselines.hard_prompts import Guess
from preimage.inversion.baselines.settings import VocabularyMatchSettings
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.expectation import Expectation, likely_first
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.models import LanguageModel


def matched(
    model: LanguageModel,
    observed: Float[Tensor, "position d"],
    target: Target,
    verifier: Verifier,
    settings: VocabularyMatchSettings,
    budget: Budget,
) -> Guess:
    """The nearest token at every position, behind the nearest ones before it.

    Cost: mostly one batch a position, where the right token is among those the model expects; at worst the
    vocabulary. Where nothing is near enough, always that.
    """
    prefix, expected = model.prefix(verifier.tap), Expectation(model)
    ids: list[int] = []
    for position, state in enumerate(observed):
        near = settings.threshold or math.sqrt(observed.shape[-1]) * target.radii[position]
        least, nearest = math.inf, 0
        for batch in _in_order(model, expected, ids).split(min(settings.batch, prefix.max_candidates)):
            try:
                budget.check(len(batch))
            except BudgetSpentError as spent:
                return Guess(tuple(ids), str(spent))
            away = city_block(verifier.observe(prefix.try_tokens(batch)), state.to(model.device))
            budget.tests += len(batch)
            if float(away.min()) < least:
                least, nearest = float(away.min()), int(batch[int(away.argmin())])
            if least <= near:
                break
        ids.append(nearest)
        prefix.extend(torch.tensor([nearest]))
    return Guess(tuple(ids))


def _in_order(model: LanguageModel, expected: Expectation, ids: list[int]) -> Int[Tensor, " vocabulary"]:
    """The whole vocabulary, the likeliest next token first."""
    if not ids:
        return likely_first(model)
    scores = expected.behind(ids)
    if scores is None:
        return torch.arange(model.vocab_size)
    return scores.argsort(descending=True).cpu()
