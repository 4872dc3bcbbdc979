"""How far apart tokens lie at the positions of a prompt: rivals tried beside every verified token.

At every position the token most likely to be mistaken for the verified one is tried, and all tokens of
almost the same embedding, as branches off the prompt. Where one is nearer than its embedding explains, the
whole vocabulary is tried at that position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.inversion.engine.budget import BudgetSpentError
from preimage.inversion.engine.jobs import LONG, Job
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.verifier import Target, Verifier, distances_of
from preimage.inversion.proposers.scores import Scores
from preimage.models import LanguageModel, states_of_branches
from preimage.observations import Tap

log = logging.getLogger(__name__)

_BRANCHES = 512  # tokens tried beside one prompt in one pass
_BATCH_TOKENS = 16384  # tokens of one pass over many prompts
_FAITHFUL = 16.0  # a branch may be so many times out of reach of the same token tried plainly
_STEP = 64  # lengths up to a multiple of this are checked together
_taken: WeakKeyDictionary[LanguageModel, dict[tuple[int, Tap, int], bool]] = WeakKeyDictionary()


class Apartness:
    """Tries rivals at the positions of prompts, for one model and layer."""

    def __init__(self, model: LanguageModel, verifier: Verifier) -> None:
        self._model, self._verifier, self._lookalikes = model, verifier, lookalikes_of(model)
        self._now = model.edition, verifier.tap

    def takes_branches(self, length: int) -> bool:
        """Whether a prompt so long and its branches give, in one pass, what they give one by one.

        Attention over a window, or with a bias of its own, may not take such masks. Tried once for a model,
        a layer and a length.
        """
        size = -(-length // _STEP) * _STEP
        size = min(size, self._model.max_length or size)
        known = _taken.setdefault(self._model, {})
        if any(key[:2] == self._now and key[2] >= size and holds for key, holds in known.items()):
            return True
        if (*self._now, size) not in known:
            known[*self._now, size] = self._try_branches(size)
        return known[*self._now, size]

    def _try_branches(self, size: int) -> bool:
        tap = self._verifier.tap
        counted = self._model.forward_tokens
        ids = ((7 + 31 * torch.arange(size)) % self._model.vocab_size)[None]
        places = torch.tensor(sorted({0, size // 2, size - 1}))
        try:
            if size > LONG:  # one pass tells: its own tokens, tried again behind it
                prefix = self._model.prefix(tap)
                plain = prefix.extend(ids[0])
                trunk, branches = plain[None], prefix.try_at(places, ids[0, places])[None]
            else:
                plain = self._model.states(ids, (tap,))[tap][0]
                trunk, branches = states_of_branches(self._model, tap, ids, places[None], ids[:, places])
        except Exception as error:  # a model with masks of its own is asked position by position
            log.info("%s takes no masks of ours: %s", self._model.name, error)
            return False
        finally:
            self._model.forward_tokens = counted
        target = Verifier(self._model, tap, noise=self._verifier.noise).target(plain)
        limits = _FAITHFUL * target.reach
        return bool(
            (target.away(trunk[0]).cpu() <= limits).all()
            and (target[places].away(branches[0]).cpu() <= limits[places]).all()
        )

    def branches(
        self, job: Job, scores: Scores, count: int
    ) -> tuple[Int[Tensor, " branch"], Int[Tensor, " branch"]]:
        """Positions and tokens still to be tried there: each one's likeliest rival, and those near it."""
        ids = job.ids[:count].tolist()
        mistakable = self._lookalikes.mistakable(ids)
        if not job.tested and not mistakable:  # most are so, and there may be very many
            rivals = job.second[:count]
            other = (rivals != job.ids[:count]).nonzero().flatten()
            return other, rivals[other]
        branches: list[tuple[int, int]] = []
        for index, (token, second) in enumerate(zip(ids, job.second.tolist(), strict=False)):
            tried = job.tested.get(index, {})
            if token in mistakable:
                near = self._lookalikes.near(token)
                second = self._unlike(job, scores, index)
                branches += [(index, other) for other in sorted({second, *near} - {token, *tried})]
            elif second != token and second not in tried:
                branches.append((index, second))
        places, tokens = torch.tensor(branches, dtype=torch.long).view(-1, 2).unbind(dim=1)
        return places, tokens

    def _unlike(self, job: Job, scores: Scores, index: int) -> int:
        """The likeliest token at a position of quite another embedding than that there, if there is one."""
        token = int(job.ids[index])
        alike = {token, *self._lookalikes.twins(token), *self._lookalikes.near(token)}
        likely = job.likely[index].tolist()
        if alike.issuperset(likely):
            likely = scores.top(job.index, index, 1 + len(alike))
        return next((other for other in likely if other not in alike), token)

    def try_at_mismatches(self, jobs: Sequence[Job], target: Target, tokens: Sequence[Tensor]) -> None:
        """Try tokens at the first mismatch of every prompt, as branches off what is verified, together."""
        longest = max(job.verified for job in jobs) + max(map(len, tokens))
        size = max(1, _BATCH_TOKENS // longest)
        for start in range(0, len(jobs), size):
            some, mine = jobs[start : start + size], tokens[start : start + size]
            ids = pad_sequence([job.ids[: job.verified] for job in some], batch_first=True)
            tried = pad_sequence(list(mine), batch_first=True)
            places = torch.tensor([[job.verified] for job in some]).expand_as(tried)
            _, states = states_of_branches(self._model, self._verifier.tap, ids, places, tried)
            rows = torch.tensor([[job.index] for job in some])
            away = target[rows, places].away(self._verifier.observe(states)).tolist()
            for job, own, distances in zip(some, mine, away, strict=True):
                job.tested[job.verified].update(zip(own.tolist(), distances, strict=False))
                job.budget.tests += len(own)

    def unclear(self, job: Job, scores: Scores, count: int) -> list[int]:
        """Those of some verified positions at which another token may fit, or is not far from it."""
        places, tokens = self.branches(job, scores, count)
        if job.budget.tests_left < len(tokens):
            raise BudgetSpentError("the budget is spent before it is known how far apart tokens lie")
        job.budget.check(len(tokens))
        if len(tokens) and self.takes_branches(count):
            prefix = job.prefix_at(count)
            for some, ids in zip(places.split(_BRANCHES), tokens.split(_BRANCHES), strict=True):
                states = self._verifier.observe(prefix.try_at(some, ids))
                job.note_rivals(some, ids, job.target[some.tolist()].away(states))
        else:
            for index in reversed(places.unique().tolist()):  # on a prefix that grows shorter
                mine = tokens[places == index]
                away = self._verifier.distances(job.prefix_at(index), mine, job.target[index])
                job.note_rivals(places[places == index], mine, away)
        return job.weigh_rivals(count, self._lookalikes)

    def first_open(self, job: Job, scores: Scores, count: int) -> int | None:
        """Try the whole vocabulary at positions that are not clear; the first where another token may fit."""
        for index in self.unclear(job, scores, count):
            if not job.is_clear(index, self._lookalikes):
                self._scan(job, index)
            if job.is_contested(index, self._lookalikes):
                return index
        return None

    def _scan(self, job: Job, index: int) -> None:
        """Try every token at a verified position."""
        token, prefix = int(job.ids[index]), job.prefix_at(index)
        tested = distances_of(job.others[index], self._model.vocab_size)
        tested[token] = job.distances[index]
        rest = torch.isinf(tested).nonzero().flatten()
        for part in rest.split(prefix.max_candidates) if len(rest) else ():
            self._verifier.test(prefix, part, job.target[index], tested, job.budget)
        if bool(torch.isinf(tested).any()):
            job.budget.check()
        job.note_scan(index, tested)
