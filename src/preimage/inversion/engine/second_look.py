"""A second look at doubtful positions of a prompt that was read: the whole prompt decides.

One wrong token disturbs all later ones. So each alternative is run with everything that follows it, and taken
where that explains the states better.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtyping import Int
from torch import Tensor

from preimage.inversion.engine.asking import Asking, Rows
from preimage.inversion.engine.beginnings import Likelihoods
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.evidence import Weighed

_ALTERNATIVES, _EACH = 24, 4  # run at once, and of one position
_ROUNDS = 3  # of them
_WITHIN = 8.0  # nats behind the best within which a token is an alternative


def look_again(
    ids: Int[Tensor, " position"],
    weighed: list[Weighed | None],
    likelihoods: Likelihoods,
    sure: float,
    budget: Budget,
) -> Asking[None]:
    """Take better alternatives, in place, at positions that are not so sure."""
    for _ in range(_ROUNDS):
        doubtful = [
            (at, token, one)
            for at, one in enumerate(weighed)
            if one is not None and one.confidence < sure and len(ids) > 1
            for token, score in list(zip(one.tokens, one.scores, strict=True))[:_EACH]
            if score >= one.scores[0] - _WITHIN and token != int(ids[at])
        ][:_ALTERNATIVES]
        if not doubtful:
            return
        budget.check(len(doubtful))
        budget.tests += len(doubtful)
        rows = ids.repeat(1 + len(doubtful), 1)
        for row, (at, token, _one) in zip(rows[1:], doubtful, strict=True):
            row[at] = token
        base, *others = likelihoods((yield Rows(rows)))
        gains = []
        for (at, token, one), other in zip(doubtful, others, strict=True):
            own = dict(zip(one.tokens, one.scores, strict=True))
            gains.append(float((other - base)[at + 1 :].sum()) + own[token] - own[int(ids[at])])
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] <= 0:
            return
        at, token, one = doubtful[best]
        ids[at] = token
        weighed[at] = replace(one, confidence=one.confidence / (1 + math.exp(-gains[best])))
