"""How a prompt begins, told by what follows.

The first state is an attention sink: noise, or another arithmetic, drowns what it says of its token. What
follows looks back on it. So pairs of first tokens are run with the tokens read behind them, and the states
of all of these decide: few pairs; where none of them stands out, many; and then tokens like the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

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

_FIRST_TOKENS = {"cpu": (64, 512), "cuda": (64, 1024)}  # tried as the first: at once, and where need be
_FEW = {"cpu": 24, "cuda": 0}  # tried before that behind the second token that was read, by all followers
_COMPARED = 256  # of them, where they are ranked by their states
_SECONDS = (3, 64)  # second tokens tried behind each of them, and behind the likeliest
_LIKELIEST = {"cpu": (8, 16), "cuda": (8, 32)}  # how many these are
_NEXT = 2  # followers by which all pairs are compared
_FINALISTS = 64  # pairs that are compared by all followers
_ALIKE, _CLIMBS = 256, 4  # tokens like the best one that are tried, and how often in turn
_DROWNED = 0.3  # the chance that a first token that noise drowns was none of those tried
_NEXT_TO = 0.1  # what that counts for at the second

Pairs: TypeAlias = Int[Tensor, "pair 2"]
Likelihoods: TypeAlias = Callable[[Float[Tensor, "row position d"]], Float[Tensor, "row position"]]


class Beginning(NamedTuple):
    """Two tokens, and how sure each is."""

    ids: list[int]
    sure: tuple[float, float]


class Beginnings:
    """The beginnings of one prompt, of which the first tokens were read once.

    ``itself``: the weight of what the proposer says of the first token; ``noisy``: whether noise hides that;
    ``compared``: whether ``likely`` are the likeliest of all, by their states.
    """

    def __init__(
        self,
        model: LanguageModel,
        scores: Scores,
        ids: Int[Tensor, " position"],
        likely: Sequence[int],
        likelihoods: Likelihoods,
        *,
        itself: float,
        noisy: bool,
        compared: bool,
    ) -> None:
        self._model, self._ids, self._likely, self._likelihoods = model, ids, likely, likelihoods
        self._proposed = [scores.at(scores.row(0, at))[0].cpu() for at in (0, 1)]
        self._alone = itself * self._proposed[0].log_softmax(dim=0)
        self._compared, self._drowned = compared and noisy, noisy and not compared
        self._heads = torch.empty(0, 2, dtype=torch.long)  # the best so far
        self._totals = torch.empty(0, dtype=torch.float64)

    def settle(self, enough: float, budget: Budget) -> Asking[Beginning]:
        """The likeliest beginning; where it is sure enough, few pairs are tried."""
        opening = yield Expected(self._opening)
        order = self._proposed[0].argsort(descending=True)
        if opening is not None:
            order = together(self._proposed[0], opening.cpu())
        few = by_device(_FEW, self._model.device)
        if few:
            likely = [*self._likely[:few], *order[:few].tolist()]
            if self._compared:
                likely = list(self._likely[: 2 * few])
            found = yield from self._among(likely, budget)
            if min(found.sure) >= enough * (1 - untried(2 * few)):
                return found
        widths = (by_device(sizes, self._model.device) for sizes in (_FIRST_TOKENS, _LIKELIEST))
        for wide, likeliest in zip(*widths, strict=True):
            first = [int(self._ids[0]), *self._likely[:wide], *order[:wide].tolist()]
            if self._compared:
                first = [int(self._ids[0]), *self._likely[: min(wide, _COMPARED)]]
            yield from self._try(first, likeliest, budget)
            found = self._found(wide)
            if min(found.sure) >= enough * (1 - untried(wide)):
                return found
        for _ in range(_CLIMBS):
            best = int(self._heads[0, 0])
            yield from self._try(self._like(best), 1, budget)
            if int(self._heads[0, 0]) == best:
                break
        return self._found(wide)

    def _among(self, first: list[int], budget: Budget) -> Asking[Beginning]:
        """Few first tokens before the second that was read: mostly it was read rightly."""
        tokens = list(dict.fromkeys([int(self._ids[0]), *first]))[: max(1, budget.tests_left // 4)]
        heads = torch.tensor([(token, int(self._ids[1])) for token in tokens])
        totals = yield from self._compare(heads, len(self._ids), budget)
        order = totals.argsort(descending=True)
        self._heads, self._totals = heads[order], totals[order]
        return self._found(len(tokens))

    def _try(self, first: list[int], likeliest: int, budget: Budget) -> Asking[None]:
        """Compare pairs by a few followers, and the best of them and of those before by all."""
        heads = self._pairs(first, likeliest)[: max(1, budget.tests_left // 4)]
        totals = yield from self._compare(heads, 1 + _NEXT, budget)
        heads = heads[totals.topk(min(_FINALISTS, len(totals))).indices]
        heads = torch.cat([self._heads, heads]).unique(dim=0)
        totals = yield from self._compare(heads, len(self._ids), budget)
        order = totals.argsort(descending=True)[:_FINALISTS]
        self._heads, self._totals = heads[order], totals[order]

    def _compare(self, heads: Pairs, length: int, budget: Budget) -> Asking[Float[Tensor, " pair"]]:
        """The log likelihood of each beginning, together with what was read behind it."""
        budget.check(len(heads))
        budget.tests += len(heads)
        rest = self._ids[None, 2:length].expand(len(heads), -1)
        states = yield Rows(torch.cat([heads, rest], dim=1)[:, : len(self._ids)])
        totals: Tensor = self._likelihoods(states).sum(dim=1) + self._alone[heads[:, 0]]
        return totals

    def _found(self, tried: int) -> Beginning:
        room = untried(tried) if tried < self._model.vocab_size else 0.0
        room = max(room, _DROWNED) if self._drowned else room
        shares = self._totals.softmax(dim=0)
        first, second = (float(shares[self._heads[:, one] == self._heads[0, one]].sum()) for one in (0, 1))
        return Beginning(self._heads[0].tolist(), (first * (1 - room), second * (1 - _NEXT_TO * room)))

    def _pairs(self, first: list[int], likeliest: int) -> Pairs:
        """Pairs: many first tokens with few second ones, few with many."""
        tokens = list(dict.fromkeys(first))
        few, many = _SECONDS
        proposed = self._proposed[1].topk(min(many, len(self._proposed[1]))).indices.tolist()
        before = self._heads[:1, 1].tolist()
        seconds = list(dict.fromkeys([*before, int(self._ids[1]), *proposed]))
        pairs = [(u, v) for u in tokens for v in seconds[:few]]
        pairs += [(u, v) for u in tokens[:likeliest] for v in seconds[few:]]
        return torch.tensor(pairs)

    def _like(self, token: int) -> list[int]:
        """Tokens whose embeddings point most nearly the same way."""
        table = self._model.embedding_table
        alike = (table @ table[token]).float() / table.float().norm(dim=1).clamp_min(1e-30)
        return [token, *alike.topk(min(_ALIKE, len(alike))).indices.tolist()]

    @property
    def _opening(self) -> Int[Tensor, " position"]:
        """What may stand before a prompt, for an idea of how prompts begin."""
        bos = getattr(self._model.tokenizer, "bos_token_id", None)
        return torch.tensor([] if bos is None else [int(bos)], dtype=torch.long)
