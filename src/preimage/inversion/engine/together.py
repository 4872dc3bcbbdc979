"""Many prompts in shared passes, on a GPU.

While one pass runs, what the one before it has shown is taken in and the next is chosen: prompts that go on
come first, then others that wait. Prompts likely to need several passes begin first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import by_device
from preimage.inversion.engine.alone import Alone
from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.budget import BudgetSpentError
from preimage.inversion.engine.guessing import Guessing
from preimage.inversion.engine.jobs import Branches, Job, replaced
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.repairing import Repairing
from preimage.inversion.engine.search import Outcome
from preimage.inversion.engine.shared_pass import SharedPass
from preimage.inversion.engine.verifier import LARGE, Target, Verifier
from preimage.inversion.proposers.scores import Scores
from preimage.models import LanguageModel

_LADDER = (2, 32, 256)  # candidates tried, round after round, before those on a cached prefix
_BATCH_TOKENS = 16384  # tokens of the prompts of one pass
_HURRIED = {"cpu": 0, "cuda": 32}  # prompts left, of which passes take as long with many candidates as few


class Attempt(NamedTuple):
    """What came of one row in a shared pass."""

    reached: int  # positions that agree with what was observed, from the left
    row: Int[Tensor, " position"]
    distances: list[float]
    in_parts: bool


class Together:
    """Inverts prompts in shared passes, for one model and layer."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        apart: Apartness,
        guessing: Guessing,
        repairing: Repairing,
        alone: Alone,
    ) -> None:
        self._model, self._verifier, self._lookalikes = model, verifier, lookalikes_of(model)
        self._apart, self._guessing, self._repairing, self._alone = apart, guessing, repairing, alone

    def run(
        self, jobs: list[Job], target: Target, scores: Scores, ended: Callable[[int, Outcome], None]
    ) -> None:
        """Run prompts to their end; ``target`` is of all, by index, and ``ended`` is told of some early."""
        for job in jobs:
            job.shared = bool(by_device(LARGE, self._model.device))
        self._run_to_last(jobs, target, scores, ended)
        parted = [job for job in jobs if job.outcome is None]
        for job in self._run_whole(parted, target):
            self._alone.run(job, scores)
        self._run_to_last([job for job in parted if job.outcome is None], target, scores, ended)

    def _run_to_last(
        self, jobs: list[Job], target: Target, scores: Scores, ended: Callable[[int, Outcome], None]
    ) -> None:
        """Run prompts until each has ended, or was verified in several passes and in none as a whole."""
        size = max(1, _BATCH_TOKENS // target.low.shape[1])
        waiting = sorted(jobs, key=lambda job: -job.misses)
        going: list[Job] = []
        stuck: list[Job] = []  # what does not go on in a shared pass
        running: SharedPass | None = None
        while waiting or going or stuck or running:
            some = [*going, *waiting][:size]
            begun = None
            if running is None or 2 * len(some) >= size:
                waiting, going = waiting[max(0, size - len(going)) :], going[size:]
                begun = self._begin(some, target, scores, last=not (waiting or going or running))
                apart = some if begun is None else [job for job in some if job not in begun]
                stuck += self._not_ended(apart, scores)
            if running is not None:
                going += self._take_in(running, target, scores, ended)
            running = begun
            if not waiting:
                going, stuck = going + self._try_more(stuck, target, scores), []
            refused = {job: self._is_run(job) for job in going}
            stuck += [job for job in going if refused[job]]
            going = [job for job in going if not refused[job]]

    def _begin(self, jobs: list[Job], target: Target, scores: Scores, *, last: bool) -> SharedPass | None:
        """Begin a pass over prompts, with candidates where they are in doubt, else with rivals everywhere.

        Those are left out that are better run without branches; of none there is no pass.
        """
        self._lookalikes.look_up([token for job in jobs for token in job.ids.tolist()])
        for job in jobs:
            job.hurried = last and len(jobs) <= by_device(_HURRIED, self._model.device)
        self._guessing.look_up([job for job in jobs if job.distances and job.verified < len(job)], scores)
        longest = target.low.shape[1]
        every = [(job, self._beside(job, scores, longest)) for job in jobs]
        some = {job: branches for job, branches in every if branches is not None}
        if not some:
            return None
        return SharedPass(self._model, self._verifier, target, [*some], [*some.values()])

    def _beside(self, job: Job, scores: Scores, longest: int) -> Branches | None:
        """What runs beside a prompt that shares a pass: candidates where it is in doubt, else rivals."""
        if self._alone.guesses(job):
            return self._guessing.branches(job, scores, len(job))
        return self._alone.branches(job, scores, longest)

    def _is_run(self, job: Job) -> bool:
        """Whether the proposal of a prompt was run, and is refused where it does not fit."""
        at = job.verified
        return at < len(job) and int(job.ids[at]) in job.tested.get(at, {}) and not self._alone.guesses(job)

    def _take_in(
        self, ran: SharedPass, target: Target, scores: Scores, ended: Callable[[int, Outcome], None]
    ) -> list[Job]:
        """Take in what a pass has shown of its prompts; those that are to go on."""
        whole, nearest, away, beside = ran.results()
        for row, (job, branches) in enumerate(zip(ran.jobs, ran.branches, strict=True)):
            if whole[row] and not job.tested and self._lookalikes.unmistakable(job.ids.tolist()):
                job.conclude_at_once(away[row][: len(job)], *nearest.columns(row, len(job)))
                continue
            if job.verified < len(job):
                self._alone.settle(job, job.ids, job.carry_on(away[row][: len(job)]))
            self._alone.note(job, branches, beside[row])
        open_ = [job for job in ran.jobs if job.verified < len(job)]
        near = [job for job in open_ if job.shared and job.near_miss(job.verified) == job.ids[job.verified]]
        self._look_again(near, target)
        for job in open_:
            if job.verified < len(job):
                self._alone.take_fitting(job, scores)
                if job.plainly and job.outcome is None:
                    self._alone.run(job, scores)
        left = self._not_ended(ran.jobs, scores)
        for job in ran.jobs:
            if job.outcome is not None:
                ended(job.index, job.outcome)
        return left

    def _not_ended(self, jobs: Sequence[Job], scores: Scores) -> list[Job]:
        """Those of some prompts that go on; what is verified ends, once rivals were tried everywhere."""
        left = []
        for job in jobs:
            if job.outcome is None and job.verified == len(job) and job.closing:
                self._repairing.conclude(job, scores)
            job.closing = job.verified == len(job)
            if job.outcome is None and not (job.closing and job.in_parts):
                left.append(job)
        return left

    def _try_more(self, stuck: list[Job], target: Target, scores: Scores) -> list[Job]:
        """Try more candidates where shared passes do not help; those that are to go on."""
        open_ = {job.index: job for job in stuck if job.outcome is None}
        asked = {
            index: self._next_rows(job, scores) for index, job in open_.items() if job.verified < len(job)
        }
        trials = {index: some for index, some in asked.items() if isinstance(some, Tensor)}
        if trials:
            self._apart.try_at_mismatches([open_[index] for index in trials], target, [*trials.values()])
        rows = {index: some for index, some in asked.items() if isinstance(some, list) and some}
        for index, some in self._run_rows(open_, target, rows).items():
            self._keep_furthest(open_[index], some)
        return self._not_ended([*open_.values()], scores)

    def _run_whole(self, jobs: list[Job], target: Target) -> list[Job]:
        """Run prompts that were verified in several passes in one; those whose states it does not give."""
        for job, away in zip(jobs, self._in_large_batch(jobs, target), strict=True):
            job.distances, job.in_parts = away, False
        return [job for job in jobs if job.agreeing(job.ids, job.distances) < len(job)]

    def _look_again(self, jobs: list[Job], target: Target) -> None:
        """Run prompts that are off by little once more, in a large batch, as many were made in."""
        for job, away in zip(jobs, self._in_large_batch(jobs, target), strict=True):
            job.looks[job.verified] += 1
            if job.agreeing(job.ids, away) > job.verified:
                job.tested.get(job.verified, {}).pop(int(job.ids[job.verified]), None)
                self._alone.settle(job, job.ids, job.carry_on(away))

    def _in_large_batch(self, jobs: list[Job], target: Target) -> list[list[float]]:
        """The distances of prompts as a large batch has them."""
        if not jobs:
            return []
        ids = pad_sequence([job.ids for job in jobs], batch_first=True)
        seen = self._verifier.observe(self._verifier.states_in_large_batch(ids))
        distances = target[[job.index for job in jobs], : ids.shape[1]].away(seen).tolist()
        return [away[: len(job)] for job, away in zip(jobs, distances, strict=True)]

    def _next_rows(self, job: Job, scores: Scores) -> list[Tensor] | Tensor:
        """The rows to run next for a prompt, or the tokens to try at its mismatch; none when it has ended."""
        at = job.verified
        fits = job.nearest(at) is not None  # a rival that was tried beside the pass
        try:
            if job.distances:  # the first pass is made in any case
                job.budget.check(0 if fits else 1)
            if int(job.ids[at]) not in job.tested.get(at, {}):  # the proposal was not run yet
                return [job.affordable(len(job))]
            if self._repairing.fits_plainly(job):
                if job.plainly:
                    self._alone.run(job, scores)
                return []
            if fits or job.led or job.stage == len(_LADDER):
                if self._repairing.repair(job, scores) and job.plainly:
                    self._alone.run(job, scores)
                return []
        except BudgetSpentError as spent:
            self._repairing.stop(job, spent)
            return []
        at, refused = job.verified, job.tested[job.verified]
        enough = (stage for stage, size in enumerate(_LADDER) if 2 * size >= len(refused))
        stage = max(job.stage, next(enough, len(_LADDER) - 1))
        count = min(_LADDER[stage], job.budget.tests_left)
        job.stage = stage + 1
        fresh = [t for t in scores.top(job.index, at, len(refused) + count) if t not in refused][:count]
        if not fresh:
            return self._next_rows(job, scores)
        if stage and self._apart.takes_branches(at + 1):
            return torch.tensor(fresh)
        row = job.affordable(at + 1 if stage else len(job), count)
        return [replaced(row, at, token) for token in fresh]

    def _run_rows(
        self, jobs: dict[int, Job], target: Target, rows: dict[int, list[Tensor]]
    ) -> dict[int, list[Attempt]]:
        """Run every row of every open prompt, in shared passes; what each has come to, by prompt."""
        tap = self._verifier.tap
        every = [(index, row) for index, some in rows.items() for row in some]
        every.sort(key=lambda item: len(item[1]))  # rows of about one length share a pass
        attempts: dict[int, list[Attempt]] = {index: [] for index in rows}
        size = max(1, _BATCH_TOKENS // target.low.shape[1])
        for start in range(0, len(every), size):
            part = every[start : start + size]
            ids = pad_sequence([row for _, row in part], batch_first=True)
            seen = self._verifier.observe(self._model.states(ids, (tap,))[tap])
            distances = target[[index for index, _ in part], : ids.shape[1]].away(seen).tolist()
            for (index, row), away in zip(part, distances, strict=True):
                job, away = jobs[index], jobs[index].carry_on(away[: len(row)])
                reached = job.agreeing(row, away)
                job.count_tests(job.verified, reached, len(row))
                if reached == job.verified:
                    job.refuse(row, reached, away)
                attempts[index].append(Attempt(reached, row, away, job.in_parts))
        return attempts

    def _keep_furthest(self, job: Job, attempts: list[Attempt]) -> None:
        """Settle what the row that got furthest has verified."""
        reached, row, away, job.in_parts = max(attempts, key=lambda one: one.reached)
        if reached > job.verified or not job.distances:
            job.ids = torch.cat([row, job.ids[len(row) :]])
            job.verified, job.distances, job.stage = reached, away, 0
            job.refuse(row, reached, away)  # what was refused behind another token was of another prompt


@contextmanager
def uninterrupted(device: torch.device) -> Iterator[None]:
    """Without the garbage collector, which would look at everything that is held while a GPU waits."""
    was = gc.isenabled()
    if device.type != "cpu":
        gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
