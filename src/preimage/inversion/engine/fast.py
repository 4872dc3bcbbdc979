"""Exact inversion in passes: propose every position, verify in one pass, mend what is wrong, go on.

What a pass verifies from the left is settled. Where proposals are in doubt, candidates for all of them run
beside the prompt in one pass and the nearest are taken (``guessing``). On a GPU many prompts share a pass; on
a CPU they go one by one, on the keys and values the last pass left behind. Where guesses do not help,
candidates are tried at the first mismatch in the proposer's order, up to the whole vocabulary
(``repairing``). The last pass runs over the whole prompt. Beside it, in the same pass, the token most likely
to be mistaken is tried at every position: where that is not far away, a search with the whole vocabulary
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import by_device, fetch
from preimage.inversion.engine.apartness import Apartness, Nearest
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.guessing import Guessing, look_ahead
from preimage.inversion.engine.jobs import LONG, Job, replaced
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.repairing import Repairing, RepairPolicy
from preimage.inversion.engine.search import Outcome
from preimage.inversion.engine.verifier import LARGE, Target, Verifier
from preimage.inversion.proposers.registry import LENS
from preimage.inversion.proposers.scores import Scores
from preimage.inversion.proposers.standard import Proposer
from preimage.models import LanguageModel, states_of_branches

_LADDER = (2, 32, 256)  # candidates tried on a GPU, round after round, before those on a cached prefix
_BATCH_TOKENS = 16384  # tokens of one pass
_WHOLE_REPAIRS = 1  # with more repairs a prompt is run from its first mismatch on, and whole at last


class Attempt(NamedTuple):
    """What came of one row in a shared pass."""

    reached: int  # positions that agree with what was observed, from the left
    row: Int[Tensor, " position"]
    distances: list[float]


class FastInverter:
    """Inverts prompts, together (on a GPU) or one by one; ``repair`` may change the order of candidates."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        proposer: Proposer,
        repair: RepairPolicy = lambda prefix, observed, ranked: ranked,
        together: bool | None = None,
        *,
        hand_on: bool = False,
    ) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._lookalikes, self._apart = lookalikes_of(model), Apartness(model, verifier)
        self._guessing = Guessing(model, self._apart)
        self._repairing = Repairing(
            model, verifier, self._apart, repair,
            hand_on=hand_on,
            along_tangents=not proposer.name.startswith(LENS),
        )  # fmt: skip
        self._together = model.device.type != "cpu" if together is None else together

    def prepare(self, longest: int) -> None:
        """Find out before the clock of a prompt runs what is asked of the model once."""
        self._apart.takes_branches(longest)

    def run(
        self,
        observed: Sequence[Float[Tensor, "_ d_model"]],
        budgets: Sequence[Budget],
        known: Sequence[int] = (),
        proposal: Sequence[int] = (),
    ) -> list[Outcome]:
        """One outcome a prompt; prompts may differ in length, and all begin with the known tokens.

        ``proposal``: all tokens of the only prompt, where they have been found already.
        """
        with torch.inference_mode():
            lengths = torch.tensor([len(states) for states in observed], device=self._model.device)
            padded = pad_sequence(list(observed), batch_first=True).to(self._model.device)
            valid = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
            scores = self._proposer.score(padded, valid)
            own = [one[: len(known)] for one in observed]
            target = self._verifier.targets([one[len(known) :] for one in observed])
            target = self._verifier.behind(torch.stack(own), target) if known else target
            likely, chances = (side.cpu() for side in scores.likeliest())
            ids = likely[..., 0].clone()
            given = proposal or known
            ids[:, : len(given)] = torch.tensor(given, dtype=ids.dtype)
            make_prefix = partial(self._model.prefix, self._verifier.tap)
            jobs = [
                Job(
                    i,
                    padded[i, :n],
                    target[i, :n],
                    ids[i, :n],
                    likely[i, :n],
                    chances[i, :n],
                    budget,
                    make_prefix,
                )
                for i, (n, budget) in enumerate(zip(lengths.tolist(), budgets, strict=True))
            ]
            for job in jobs:
                job.known = len(known)
                if proposal:
                    job.chances = torch.ones_like(job.chances[:, :1])
            if not proposal:
                look_ahead(jobs, likely, chances)
            if self._together:
                self._run_together(jobs, target, scores)
            else:
                for job in jobs:
                    self._run_alone(job, scores)
        return [job.outcome for job in jobs]  # type: ignore[misc]  # every job has ended

    # One prompt, on the keys and values its passes leave behind.

    def _run_alone(self, job: Job, scores: Scores) -> None:
        whole, job.shared = True, False
        try:
            while job.outcome is None:
                job.check_budget()
                if self._guesses(job):
                    self._guess(job, scores)
                    whole = job.verified == len(job) or (not job.doubts and len(job) <= LONG)
                    continue
                self._pass(job, scores, 0 if whole else job.verified)
                if job.verified == len(job):
                    if whole:
                        self._repairing.conclude(job, scores)
                    whole = True
                    continue
                if job.verified == len(job.distances):  # all of a row that ends before the prompt
                    continue
                job.budget.check()
                if self._repairing.fits_plainly(job) or (
                    not self._guesses(job) and self._repairing.repair(job, scores)
                ):
                    whole = len(job.repaired) <= _WHOLE_REPAIRS
        except BudgetSpentError as spent:
            self._repairing.stop(job, spent)

    def _pass(self, job: Job, scores: Scores, start: int) -> None:
        """Run a prompt from a position on; what agrees from the left is settled."""
        row = job.row_from(start)
        branches = None if start or job.plainly else self._branches(job, scores, LONG)
        if job.plainly:
            distances = self._verifier.whole_sequence(row.tolist(), job.target[: len(row)])
        elif branches is not None:
            states, rivals = map(self._verifier.observe, job.run_with_branches(row, 0, *branches))
            distances = job.target.away(states).tolist()
        else:
            seen = self._verifier.observe(job.extend_prefix(row, start))
            distances = job.distances[:start] + job.target[start : len(row)].away(seen).tolist()
        self._settle(job, row, distances)
        if branches is not None:
            self._note(job, branches, job.target[branches[0].tolist()].away(rivals).cpu())

    def _guesses(self, job: Job) -> bool:
        """Whether candidates for several doubtful positions are run together next."""
        return not self._repairing.is_coarse(job) and self._guessing.is_worth(job)

    def _guess(self, job: Job, scores: Scores) -> None:
        """Run a prompt from its first mismatch on, with candidates for all positions in doubt."""
        start, end = job.verified, len(job)
        if end > LONG:
            end = len(job.row_from(start))
        branches = self._guessing.branches(job, scores, end)
        row = job.ids[:end]
        states, others = map(self._verifier.observe, job.run_with_branches(row, start, *branches))
        self._settle(job, row, job.distances[:start] + job.target[start:end].away(states).tolist())
        self._note(job, branches, job.target[branches[0].tolist()].away(others).cpu())
        self._take_fitting(job, scores)

    def _take_fitting(self, job: Job, scores: Scores) -> None:
        """Put a token that was tried at the first mismatch and fits there, plainly or not."""
        if job.verified == len(job.distances):
            return
        if self._repairing.fits_plainly(job):
            if self._together and job.plainly:
                self._run_alone(job, scores)
        elif job.nearest(job.verified) is not None:
            self._repairing.repair(job, scores)

    def _note(self, job: Job, branches: tuple[Tensor, Tensor], distances: Tensor) -> None:
        job.note_rivals(*branches, distances)
        self._guessing.note(job, *branches, distances)

    def _settle(self, job: Job, row: Tensor, distances: list[float]) -> None:
        before, job.distances = job.verified, distances
        job.verified = job.agreeing(row, distances)
        job.refuse(row, job.verified, distances)
        job.count_tests(before, job.verified, len(row))

    def _branches(self, job: Job, scores: Scores, longest: int) -> tuple[Tensor, Tensor] | None:
        """The rivals to run beside a whole prompt; None where they are better tried later, or not at all."""
        if len(job) > longest or not self._apart.takes_branches(len(job)):
            return None
        branches = self._apart.branches(job, scores, len(job))
        branches = self._guessing.beside(job, *branches)
        enough = job.budget.tests_left >= len(job) + len(branches[0])
        return branches if enough and 0 < len(branches[0]) <= 2 * max(longest, len(job)) else None

    # Many prompts in shared passes.

    def _run_together(self, jobs: list[Job], target: Target, scores: Scores) -> None:
        for job in jobs:
            job.shared = bool(by_device(LARGE, self._model.device))
        self._run_with_branches(jobs, target, scores)
        left = [job for job in jobs if job.outcome is None and job.verified < len(job)]
        while left:
            ran = self._run_with_branches([job for job in left if self._is_unrun(job)], target, scores)
            asked = {job.index: self._next_rows(job, scores) for job in left if job.index not in ran}
            trials = {index: some for index, some in asked.items() if isinstance(some, Tensor)}
            if trials:
                self._apart.try_at_mismatches([jobs[index] for index in trials], target, [*trials.values()])
            rows = {index: some for index, some in asked.items() if isinstance(some, list) and some}
            for index, some in self._run_rows(jobs, target, rows).items():
                self._keep_furthest(jobs[index], some, scores)
            left = [job for job in left if job.outcome is None and job.verified < len(job)]
        left = [job for job in jobs if job.outcome is None]
        self._run_with_branches(left, target, scores)
        for job in left:
            self._repairing.conclude(job, scores)

    def _is_unrun(self, job: Job) -> bool:
        """Whether the next pass of a prompt runs its proposal, which is another one than before."""
        return self._guesses(job) or int(job.ids[job.verified]) not in job.tested.get(job.verified, {})

    def _run_with_branches(self, jobs: list[Job], target: Target, scores: Scores) -> set[int]:
        """Run prompts in shared passes, with candidates where they are in doubt, else with rivals everywhere.

        Which prompts were run; not those that are better run without branches.
        """
        self._lookalikes.look_up([token for job in jobs for token in job.ids.tolist()])
        longest = target.low.shape[1]
        asked = [
            (job, self._guessing.branches(job, scores, len(job)))
            if self._guesses(job)
            else (job, self._branches(job, scores, longest))
            for job in jobs
        ]
        every = [(job, branches) for job, branches in asked if branches is not None]
        every.sort(key=lambda item: len(item[1][0]))  # so that little is padded
        passes = []
        while every:
            size = max(1, _BATCH_TOKENS // (longest + len(every[-1][1][0])))
            some, every = every[-size:], every[:-size]
            passes.append((some, self._run_shared(some, target)))
        for some, ran in passes:  # while the next ones run
            self._take_in(some, target, *ran)
        ran_now = [job for job, branches in asked if branches is not None]
        near = [job for job in ran_now if job.shared and job.verified < len(job)]
        self._look_again(
            [job for job in near if job.near_miss(job.verified) == job.ids[job.verified]], target
        )
        for job in ran_now:
            if job.verified < len(job):
                self._take_fitting(job, scores)
        return {job.index for job in ran_now}

    def _run_shared(
        self, some: Sequence[tuple[Job, tuple[Tensor, Tensor]]], target: Target
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor], Callable[[], Tensor]]:
        """One pass over some prompts and their branches, begun: the branches, and the distances to come."""
        ids = pad_sequence([job.ids for job, _ in some], batch_first=True)
        places, tokens = (
            pad_sequence(list(column), batch_first=True)
            for column in zip(*(branches for _, branches in some), strict=True)
        )
        states = states_of_branches(self._model, self._verifier.tap, ids, places, tokens)
        trunk, rivals = map(self._verifier.observe, states)
        rows = torch.tensor([[job.index] for job, _ in some])
        away = target[rows[:, 0], : ids.shape[1]].away(trunk)
        return places, tokens, fetch(away), fetch(target[rows, places].away(rivals))

    def _take_in(
        self,
        some: Sequence[tuple[Job, tuple[Tensor, Tensor]]],
        target: Target,
        places: Tensor,
        tokens: Tensor,
        get_away: Callable[[], Tensor],
        get_beside: Callable[[], Tensor],
    ) -> None:
        """What a pass has shown of its prompts; those that it settles end here."""
        away, beside = get_away(), get_beside()
        counts, lengths = [len(branches[0]) for _, branches in some], [len(job) for job, _ in some]
        nearest = Nearest.of(places, tokens, beside, counts, away.shape[1])
        rows = [job.index for job, _ in some]
        far, radius = (side[rows, : away.shape[1]] for side in (target.far, target.radius))
        whole = nearest.all_far(far, radius, away, lengths)
        for row, ((job, branches), distances) in enumerate(zip(some, away.tolist(), strict=True)):
            if whole[row] and not job.tested and self._lookalikes.unmistakable(job.ids.tolist()):
                job.conclude_at_once(distances[: len(job)], *nearest.columns(row, len(job)))
                continue
            if job.verified < len(job):
                self._settle(job, job.ids, distances[: len(job)])
            self._note(job, branches, beside[row, : len(branches[0])])

    def _look_again(self, jobs: list[Job], target: Target) -> None:
        """Run prompts that are off by little once more, in a large batch, as many were made in."""
        if not jobs:
            return
        ids = pad_sequence([job.ids for job in jobs], batch_first=True)
        seen = self._verifier.observe(self._verifier.states_in_large_batch(ids))
        distances = target[[job.index for job in jobs], : ids.shape[1]].away(seen).tolist()
        for job, away in zip(jobs, distances, strict=True):
            job.looks[job.verified] += 1
            if job.agreeing(job.ids, away[: len(job)]) > job.verified:
                job.tested.get(job.verified, {}).pop(int(job.ids[job.verified]), None)
                self._settle(job, job.ids, away[: len(job)])

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
                    self._run_alone(job, scores)
                return []
            if fits or job.led or job.stage == len(_LADDER):
                if self._repairing.repair(job, scores) and job.plainly:
                    self._run_alone(job, scores)
                return []
        except BudgetSpentError as spent:
            self._repairing.stop(job, spent)
            return []
        at, refused, stage = job.verified, job.tested[job.verified], job.stage
        count = min(_LADDER[stage], job.budget.tests_left)
        job.stage += 1
        fresh = [t for t in scores.top(job.index, at, len(refused) + count) if t not in refused][:count]
        if not fresh:
            return self._next_rows(job, scores)
        if stage and self._apart.takes_branches(at + 1):
            return torch.tensor(fresh)
        row = job.affordable(at + 1 if stage else len(job), count)
        return [replaced(row, at, token) for token in fresh]

    def _run_rows(
        self, jobs: list[Job], target: Target, rows: dict[int, list[Tensor]]
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
                job = jobs[index]
                reached = job.agreeing(row, away)
                job.count_tests(job.verified, reached, len(row))
                if reached == job.verified:
                    job.refuse(row, reached, away)
                attempts[index].append(Attempt(reached, row, away[: len(row)]))
        return attempts

    def _keep_furthest(self, job: Job, attempts: list[Attempt], scores: Scores) -> None:
        """Settle what the row that got furthest has verified."""
        reached, row, away = max(attempts, key=lambda one: one.reached)
        if reached > job.verified or not job.distances:
            job.ids = torch.cat([row, job.ids[len(row) :]])
            job.verified, job.distances, job.stage = reached, away, 0
            job.refuse(row, reached, away)  # what was refused behind another token was of another prompt
        elif reached < job.verified:  # what one shape of a pass verified another did not: noise
            self._run_alone(job, scores)
