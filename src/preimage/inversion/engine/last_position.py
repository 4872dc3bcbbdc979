"""Inversion where only the last position's state was kept.

One state does not say how long its prompt was, and prompts of many tokens cannot be enumerated. What can be
decided is whether one token made it; and then, in a model with relative positions and no BOS, every constant
prompt of that token made it as well, because identical value rows average to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.search import MAX_PROMPTS, Fit, Outcome, nearest_and_fits
from preimage.inversion.engine.verifier import Target, Verifier, distances_of
from preimage.inversion.result import Position
from preimage.models import LanguageModel

_LISTED = 8  # constant prompts of up to so many tokens are listed
LONGEST = 64  # and of up to so many are tried


def invert_last(
    model: LanguageModel, observed: Float[Tensor, "1 d"], verifier: Verifier, budget: Budget
) -> Outcome:
    """Every single-token and constant prompt whose last state is the observed one; |V| tests.

    Longer prompts are never excluded by enumeration. One token alone is the answer only where all others are
    far: then no other prompt comes that near but by a structure of the model, and constant prompts are tried.
    """
    target = verifier.target(observed)
    tested, stopped = _scan(model, target, verifier, budget)
    reach = target.reaches[0]
    nearest, fits = nearest_and_fits(0, tested, target, lookalikes_of(model))
    if not nearest.distance <= reach:
        reason = stopped or (
            "Only the last position was kept, and no prompt of one token fits: the nearest, "
            f"{nearest.token_id}, is {nearest.distance:.4g} away and {nearest.radius:.4g} is allowed. "
            "Longer prompts need the states of every position."
        )
        return Outcome((), (), nearest, reason, undecided=bool(stopped))
    hypotheses: list[tuple[Fit, ...]] = []
    for position, twins in fits:
        if len(hypotheses) >= MAX_PROMPTS:
            break
        for length in _constant_lengths(model, position, verifier, target):
            hypotheses.append(tuple(Fit(position._replace(index=i), twins) for i in range(length)))
    others = tested[tested > reach]
    far = len(others) == 0 or float(others.min()) >= target.fars[0]
    alone = len(hypotheses) == 1 and far and not stopped
    reason = "" if alone else (
        f"{stopped} Only the last position was kept: prompts of one token and constant prompts of up to "
        f"{LONGEST} tokens were tried, longer ones cannot be."
    ).strip()  # fmt: skip
    partial = hypotheses[0] if hypotheses else ()
    return Outcome(tuple(hypotheses), partial, nearest, reason, undecided=not alone)


def _scan(
    model: LanguageModel, target: Target, verifier: Verifier, budget: Budget
) -> tuple[Float[Tensor, " vocabulary"], str]:
    """The distance of every token, as far as the budget goes, and why it went no further."""
    prefix = model.prefix(verifier.tap)
    tested, reason = distances_of({}, model.vocab_size), "the budget is spent"
    try:
        for part in torch.arange(model.vocab_size).split(prefix.max_candidates):
            verifier.test(prefix, part, target[0], tested, budget)
    except BudgetSpentError as spent:
        reason = str(spent)
    whole = not bool(torch.isinf(tested).any())
    return tested, "" if whole else f"Stopped after {budget.tests} of {model.vocab_size} tokens: {reason}."


def _constant_lengths(
    model: LanguageModel, position: Position, verifier: Verifier, target: Target
) -> Iterator[int]:
    """Lengths of the prompts of one token, repeated, that fit; of those longer than listed, the shortest."""
    longest = min(LONGEST, model.max_length or LONGEST)
    once = verifier.whole_sequence([position.token_id], target)
    fits = [1] if once[0] <= position.radius else []
    repeated = target[[0] * longest]
    distances = verifier.whole_sequence([position.token_id] * longest, repeated)
    fits += [k for k in range(2, longest + 1) if distances[k - 1] <= position.radius]
    yield from (k for k in fits if k <= _LISTED or len([n for n in fits if 1 < n < k]) == 0)
