"""Inversion where only the last position's state was kept.

One state does not say how long its prompt was, and a prompt of many tokens cannot be enumerated. What can be
decided is whether one token made it; and then, in a model with relative positions and no BOS, every constant
prompt of that token made it as well, because identical value rows average to themselves.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.budget import Budget, BudgetSpentError
from preimage.inversion.search import Fit, Outcome
from preimage.inversion.twins import Rivals
from preimage.inversion.verifier import Verifier
from preimage.models import LanguageModel
from preimage.results import Position

_LENGTHS = 8  # constant prompts of up to so many tokens are listed


def invert_last(
    model: LanguageModel,
    observed: Float[Tensor, "1 d"],
    verifier: Verifier,
    budget: Budget,
) -> Outcome:
    """Every single-token and constant prompt whose last state is the observed one; |V| tests."""
    tolerance = verifier.tolerances(observed)[0]
    prefix = model.prefix(verifier.layer)
    tested = torch.full((model.vocab_size,), math.inf, dtype=torch.float64)
    reason = ""
    try:
        for part in torch.arange(model.vocab_size).split(prefix.max_candidates):
            budget.check()
            part = part[: budget.tests_left]
            tested[part] = verifier.distances(prefix, part, observed[0])
            budget.tests += len(part)
    except BudgetSpentError as spent:
        reason = f"Stopped: {spent}."
    order = tested.argsort()
    nearest = Position(
        index=0,
        token_id=int(order[0]),
        distance=float(tested[order[0]]),
        tolerance=tolerance,
        accepted=bool(tested[order[0]] <= tolerance),
        runner_up_id=int(order[1]) if len(order) > 1 else None,
        runner_up_distance=float(tested[order[1]]) if len(order) > 1 else None,
        tests=budget.tests,
    )
    if not nearest.accepted:
        reason = reason or (
            "Only the last position was kept, and no prompt of one token fits: the nearest, "
            f"{nearest.token_id}, is {nearest.distance:.4g} away and {tolerance:.4g} is allowed. Longer "
            "prompts need the states of every position."
        )
        return Outcome((), (), nearest, reason)
    twins = Rivals(model).twins(nearest.token_id)
    lengths = [k for k in range(1, _LENGTHS + 1) if _constant_fits(model, nearest, k, verifier, observed)]
    hypotheses = tuple(
        tuple(Fit(nearest._replace(index=i), twins) for i in range(length)) for length in lengths
    )
    return Outcome(hypotheses, hypotheses[0] if hypotheses else (), nearest, reason)


def _constant_fits(
    model: LanguageModel, found: Position, length: int, verifier: Verifier, observed: Tensor
) -> bool:
    if length > (model.max_length or length):
        return False
    repeated = observed.expand(length, -1)
    distance = verifier.whole_sequence([found.token_id] * length, repeated)[-1]
    return distance <= found.tolerance
