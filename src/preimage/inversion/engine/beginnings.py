"""How a prompt begins, told by what follows.

The first state is an attention sink: noise, or another arithmetic, drowns what it says of its token. What
follows looks back on it. So pairs of first tokens are run with the tokens read behind them, and the states
of all of these decide: few pairs, and where none of them stands out, many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.devices import by_device
from preimage.inversion.engine.asking import Asking, Expected, Rows
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.evidence import untried
from preimage.inversion.engine.expectation import together
from preimage.inversion.proposers.scores import Scores
from preimage.models import LanguageModel

_FIRST_TOKENS = {"cpu": (64, 1024), "cuda": (64, 4096)}  # tried as the first: at once, and where need be
_SECONDS = (3, 64)  # second tokens tried behind each of them, and behind the likeliest
_LIKELIEST = (8, 64)  # how many these are
_NEXT = 2  # followers by which all pairs are compared
_FINALISTS = 64  # pairs that are compared by all followers


class Beginning(NamedTuple):
    """Two tokens, and how sure each is."""

    ids: list[int]
    sure: tuple[float, float]


class Beginnings:
    """The beginnings of one prompt, of which the first tokens were read once."""

    def __init__(
        self, model: LanguageModel, scores: Scores, ids: Int[Tensor, " position"], likely: Sequence[int]
    ) -> None:
        self._model, self._ids, self._likely = model, ids, likely
        self._proposed = [scores.at(scores.row(0, at))[0].cpu() for at in (0, 1)]

    def settle(
        self,
        likelihoods: Callable[[Float[Tensor, "row position d"]], Float[Tensor, "row position"]],
        itself: float,
        enough: float,
        budget: Budget,
    ) -> Asking[Beginning]:
        """The likeliest beginning; ``itself``: the weight of what the proposer says of the first token."""
        opening = yield Expected(self._opening)
        order = self._proposed[0].argsort(descending=True)
        if opening is not None:
            order = together(self._proposed[0], opening)
        alone = itself * self._proposed[0].log_softmax(dim=0)
        found = Beginning(self._ids[:2].tolist(), (0.0, 0.0))
        for wide, likeliest in zip(by_device(_FIRST_TOKENS, self._model.device), _LIKELIEST, strict=True):
            heads = self._heads(order[:wide].tolist(), likeliest)[: max(1, budget.tests_left // 4)]
            for length, finalists in ((1 + _NEXT, _FINALISTS), (len(self._ids), _FINALISTS)):
                budget.check(len(heads))
                budget.tests += len(heads)
                rest = self._ids[None, 2:length].expand(len(heads), -1)
                states = yield Rows(torch.cat([heads, rest], dim=1)[:, : len(self._ids)])
                total = likelihoods(states).sum(dim=1) + alone[heads[:, 0]]
                best = total.topk(min(finalists, len(total))).indices
                heads, total = heads[best], total[best]
            shares = total.softmax(dim=0)
            found = self._found(heads, shares, wide)
            if min(found.sure) >= enough * (1 - untried(wide)):
                break
        return found

    def _found(self, heads: Int[Tensor, "pair 2"], shares: Float[Tensor, " pair"], tried: int) -> Beginning:
        room = untried(tried) if tried < self._model.vocab_size else 0.0
        first, second = (float(shares[heads[:, one] == heads[0, one]].sum()) for one in (0, 1))
        return Beginning(heads[0].tolist(), (first * (1 - room), second))

    def _heads(self, first: list[int], likeliest: int) -> Int[Tensor, "pair 2"]:
        """Pairs: many first tokens with few second ones, few with many."""
        tokens = list(dict.fromkeys([int(self._ids[0]), *self._likely[:_FINALISTS], *first]))
        few, many = _SECONDS
        proposed = self._proposed[1].topk(min(many, len(self._proposed[1]))).indices.tolist()
        seconds = list(dict.fromkeys([int(self._ids[1]), *proposed]))
        pairs = [(u, v) for u in tokens for v in seconds[:few]]
        pairs += [(u, v) for u in tokens[:likeliest] for v in seconds[few:]]
        return torch.tensor(pairs)

    @property
    def _opening(self) -> Int[Tensor, " position"]:
        """What may stand before a prompt, for an idea of how prompts begin."""
        bos = getattr(self._model.tokenizer, "bos_token_id", None)
        return torch.tensor([] if bos is None else [int(bos)], dtype=torch.long)
