"""Doubtful positions of a prompt, tried all together in one pass.

A wrong token disturbs every state behind it, but not by much: among the tokens tried at a position the right
one is nearest to what was observed all the same. So candidates for all doubtful positions run as branches off
the proposal, in one pass with it, and the nearest is taken everywhere; the next pass mostly finds the whole
prompt right. What is taken so is a better proposal and nothing more: a token is verified behind verified
tokens alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.jobs import Job, replaced
from preimage.inversion.proposers.scores import Scores
from preimage.models import LanguageModel

_FEWEST = 4096  # a vocabulary that is not larger is soon tried in full
_SURE = 0.98  # a proposal so likely is not doubted beforehand
_CHANCE = 0.002  # a candidate less likely than this is not tried beforehand
_MISSES = 0.7  # expected wrong proposals from which on doubtful ones are tried before all others are verified
_LADDER = (8, 32, 128)  # candidates tried at the first mismatch, round after round
_BEHIND = 32  # at most so many at any other position
_MOST = 64  # branches of a pass, beside those of the first mismatch
_MOST_HURRIED = 512  # the same where few prompts share a pass
_LONG = 8  # of a long prompt, one for so many positions
_NEAR = 0.5  # of how far refused tokens are: a token nearer than this is taken for the right one
_NEAR_SURE = 0.8  # the same where the proposal was sure: what is off there is mostly what stands before it


class Guessing:
    """Chooses what to try beside the proposal of a prompt, and takes what turned out to be nearest."""

    def __init__(self, model: LanguageModel, apart: Apartness) -> None:
        self._apart, self._large = apart, model.vocab_size > _FEWEST

    def is_worth(self, job: Job) -> bool:
        """Whether candidates for doubtful positions are run next, before the prompt as a whole."""
        at, size = job.verified, len(job)
        if not self._large or job.plainly or job.led or at == size or job.budget.tests_left < 2 * size:
            return False
        if not job.distances:
            worth = job.misses >= _MISSES
        elif at == job.known and len(job.tested.get(at, {})) >= _LADDER[0]:
            worth = False  # how prompts begin is known better
        elif int(job.ids[at]) in job.tested.get(at, {}):
            worth = len(job.tested[at]) < _LADDER[-1]
        else:
            worth = bool(job.doubts)
        return worth and self._apart.takes_branches(size)

    def branches(
        self, job: Job, scores: Scores, end: int
    ) -> tuple[Int[Tensor, " branch"], Int[Tensor, " branch"]]:
        """Positions before ``end`` and tokens to try there; the next best replaces a refused proposal."""
        chosen = self._at_mismatch(job, scores)
        if not job.distances:
            chosen += beforehand(job)
        else:
            behind = [
                (at, token) for at in job.doubts if at > job.verified for token in self._next(job, scores, at)
            ]
            chosen += behind[: max(_MOST_HURRIED if job.hurried else _MOST, len(job) // _LONG)]
        places, tokens = torch.tensor(chosen, dtype=torch.long).view(-1, 2).unbind(dim=1)
        return places[places < end], tokens[places < end]

    def look_up(self, jobs: Sequence[Job], scores: Scores) -> None:
        """Find the likeliest tokens where prompts do not fit or are in doubt, for all of them at once."""
        places = [(job.index, at) for job in jobs for at in (job.verified, *job.doubts)]
        scores.keep_top(places, _LADDER[-1] if all(job.hurried for job in jobs) else _BEHIND)

    def _at_mismatch(self, job: Job, scores: Scores) -> list[tuple[int, int]]:
        at, refused = job.verified, job.tested.get(job.verified, {})
        if int(job.ids[at]) not in refused:
            return []
        count = _LADDER[-1] if job.hurried else next(size for size in _LADDER if size > len(refused))
        fresh = [token for token in _likeliest(job, scores, at, count) if token not in refused]
        if fresh:
            job.ids = replaced(job.ids, at, fresh[0])
        return [(at, token) for token in fresh[1:]]

    def _next(self, job: Job, scores: Scores, at: int) -> list[int]:
        """Candidates for a doubtful position behind the first mismatch that were not tried there yet."""
        tried = job.tried.get(at, 1)
        sizes = _LADDER[-1:] if job.hurried else _LADDER
        count = next((size for size in sizes if tried < size <= (size if job.hurried else _BEHIND)), 0)
        if not count:
            return []
        job.tried[at] = count
        some = _likeliest(job, scores, at, count)
        return [token for token in some[0 if tried == 1 else tried :] if token != int(job.ids[at])]

    def beside(
        self, job: Job, places: Int[Tensor, " branch"], tokens: Int[Tensor, " branch"]
    ) -> tuple[Int[Tensor, " more"], Int[Tensor, " more"]]:
        """Branches, and what is likely where a proposal that was not run yet is not sure."""
        fresh = set(beforehand(job)) if self._large and not job.distances else set()
        if fresh:
            fresh -= set(zip(places.tolist(), tokens.tolist(), strict=True))
        if not fresh:
            return places, tokens
        more_places, more_tokens = torch.tensor(sorted(fresh)).unbind(dim=1)
        return torch.cat([places, more_places]), torch.cat([tokens, more_tokens])

    def note(
        self,
        job: Job,
        places: Int[Tensor, " branch"],
        tokens: Int[Tensor, " branch"],
        distances: Float[Tensor, " branch"],
    ) -> None:
        """Take the nearest token at every position behind the first mismatch; what is far stays in doubt."""
        at, away = job.verified, job.distances
        if not self._large or at >= len(away):
            job.doubts = []
            return
        best = {index: (away[index], token) for index, token in enumerate(job.ids.tolist()[: len(away)])}
        refused = list(job.tested.get(at, {}).values())
        for index, token, distance in zip(places.tolist(), tokens.tolist(), distances.tolist(), strict=True):
            if index > at:
                refused.append(max(distance, best[index][0]))
                best[index] = min(best[index], (distance, token))
        ids = job.ids.tolist()
        ids[at + 1 : len(away)] = [best[index][1] for index in range(at + 1, len(away))]
        job.ids = torch.tensor(ids)
        wrong = statistics.median(refused) if refused else float("inf")
        near = torch.where(job.chances[:, 0] < _SURE, _NEAR * wrong, _NEAR_SURE * wrong).tolist()
        job.doubts = [index for index in range(at + 1, len(away)) if best[index][0] > near[index]]


def look_ahead(jobs: Sequence[Job], likely: Tensor, chances: Tensor) -> None:
    """Tell prompts how many of their proposals are wrong, as likely as they are, and what is likely instead.

    ``likely``, ``chances``: of all prompts, padded to one length.
    """
    if not jobs:
        return
    at, lengths = torch.arange(likely.shape[1]), torch.tensor([len(job) for job in jobs])
    inside = (at < lengths[:, None]) & (at >= torch.tensor([job.known for job in jobs])[:, None])
    misses = ((1 - chances[..., 0]) * inside).sum(dim=1).tolist()
    other = (inside & (chances[..., 0] < _SURE))[..., None] & (chances > _CHANCE)
    other[..., 0] = False
    rows, places, ranks = other.nonzero().unbind(dim=1)
    counts = rows.bincount(minlength=len(jobs)).tolist()
    columns = places, likely[rows, places, ranks], chances[rows, places, ranks]
    for job, missed, *mine in zip(jobs, misses, *(side.split(counts) for side in columns), strict=True):
        most = max(_MOST, len(job) // _LONG)
        if len(mine[0]) > most:
            keep = mine[2].argsort(descending=True)[:most].sort().values
            mine = [side[keep] for side in mine]
        job.misses, job.instead = missed, list(zip(mine[0].tolist(), mine[1].tolist(), strict=True))


def beforehand(job: Job) -> list[tuple[int, int]]:
    """Other tokens than the proposal's that are likely at positions where it is not sure."""
    for at, _ in job.instead:
        job.tried[at] = job.chances.shape[1]
    return job.instead


def _likeliest(job: Job, scores: Scores, at: int, count: int) -> Sequence[int]:
    """The likeliest tokens at a position, the likeliest first."""
    if count <= job.likely.shape[1]:
        return job.likely[at, :count].tolist()
    return scores.top(job.index, at, count)
