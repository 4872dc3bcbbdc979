"""Exact inversion in passes: propose every position, verify in one pass, repair the first mismatch, go on.

What a pass verifies from the left is settled. On a GPU many prompts share a pass: at a mismatch the next two
candidates run in whole rows, which a right guess verifies too, then more as branches. On a CPU prompts go one
by one, and a mismatch is repaired by a batch of single tokens on the keys and values the pass left behind.
Candidates follow the proposer's order, up to the whole vocabulary, and the last pass runs over the whole
prompt. Beside it, in the same pass, the token most likely to be mistaken is tried at every position: where
that is not far away, a search with the whole vocabulary decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import by_device
from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.first_states import first_states
from preimage.inversion.engine.jobs import Job, replaced
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.policies import Policy, RankedPolicy
from preimage.inversion.engine.search import BACKOFF_RADII, Frame, Outcome, Search, VerifiedPrompt
from preimage.inversion.engine.verifier import Target, Verifier, distances_of
from preimage.inversion.proposers.scores import Scores
from preimage.inversion.proposers.standard import Proposer
from preimage.models import LanguageModel, Prefix, states_of_branches

_LADDER = (2, 32, 256)  # candidates tried on a GPU, round after round, before those on a cached prefix
_FIRST_BATCH = {"cpu": 8, "cuda": 512}  # candidates tried first on a cached prefix
_BATCH_TOKENS = 16384  # tokens of one pass
_BESIDE = 512  # a prompt of more tokens is not run together with its rivals on a CPU: nothing is gained
_SCANNED = 4096  # a vocabulary that is tried in full before evidence is asked
_PATIENCE = {"cpu": 256, "cuda": 2**31}  # candidates tried at the first position before evidence is asked
_WHOLE_REPAIRS = 1  # with more repairs a prompt is run from its first mismatch on, and whole at last
_PLAINLY = 2.0  # radii in half precision within which a token may fit in a plain pass alone

# From the prefix, the observed state and the proposer's policy to the policy of a repair.
RepairPolicy: TypeAlias = Callable[[Prefix, Tensor, Policy], Policy]


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
        self._repair_policy, self._lookalikes = repair, lookalikes_of(model)
        self._apart = Apartness(model, verifier)
        self._hand_on = hand_on and model.vocab_size > _SCANNED
        self._together = model.device.type != "cpu" if together is None else together

    def prepare(self, longest: int) -> None:
        """Find out before the clock of a prompt runs what is asked of the model once."""
        if longest <= _BESIDE or self._together:
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
            ids, second = (tokens.cpu() for tokens in scores.best_two())
            given = proposal or known
            ids[:, : len(given)] = torch.tensor(given, dtype=ids.dtype)
            make_prefix = partial(self._model.prefix, self._verifier.tap)
            jobs = [
                Job(i, padded[i, :n], target[i, :n], ids[i, :n], second[i, :n], budget, make_prefix)
                for i, (n, budget) in enumerate(zip(lengths.tolist(), budgets, strict=True))
            ]
            for job in jobs:
                job.known = len(known)
            if self._together:
                self._run_together(jobs, target, scores)
            else:
                for job in jobs:
                    self._run_alone(job, scores)
        return [job.outcome for job in jobs]  # type: ignore[misc]  # every job has ended

    # One prompt, on the keys and values its passes leave behind.

    def _run_alone(self, job: Job, scores: Scores) -> None:
        whole = True
        try:
            while job.outcome is None:
                job.check_budget()
                self._pass(job, scores, 0 if whole else job.verified)
                if job.verified == len(job):
                    if whole:
                        self._conclude(job, scores)
                    whole = True
                    continue
                if job.verified == len(job.distances):  # all of a row that ends before the prompt
                    continue
                job.budget.check()
                if self._fits_plainly(job) or self._repair(job, scores):
                    whole = len(job.repaired) <= _WHOLE_REPAIRS
        except BudgetSpentError as spent:
            self._stop(job, spent)

    def _pass(self, job: Job, scores: Scores, start: int) -> None:
        """Run a prompt from a position on; what agrees from the left is settled."""
        row = job.row_from(start)
        branches = None if start or job.plainly else self._branches(job, scores, _BESIDE)
        if job.plainly:
            distances = self._verifier.whole_sequence(row.tolist(), job.target[: len(row)])
        elif branches is not None:
            states, rivals = map(self._verifier.observe, job.run_with_rivals(*branches))
            distances = job.target.away(states).tolist()
        else:
            seen = self._verifier.observe(job.extend_prefix(row, start))
            distances = job.distances[:start] + job.target[start : len(row)].away(seen).tolist()
        self._settle(job, row, distances)
        if branches is not None:
            job.note_rivals(*branches, job.target[branches[0].tolist()].away(rivals))

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
        enough = job.budget.tests_left >= len(job) + len(branches[0])
        return branches if enough and 0 < len(branches[0]) <= max(longest, len(job)) else None

    # Many prompts in shared passes.

    def _run_together(self, jobs: list[Job], target: Target, scores: Scores) -> None:
        self._with_rivals(jobs, target, scores)
        left = [job for job in jobs if job.verified < len(job)]
        while left:
            asked = {job.index: self._next_rows(job, scores) for job in left}
            trials = {index: some for index, some in asked.items() if isinstance(some, Tensor)}
            if trials:
                self._apart.try_at_mismatches([jobs[index] for index in trials], target, [*trials.values()])
            rows = {index: some for index, some in asked.items() if isinstance(some, list) and some}
            for index, some in self._run_rows(jobs, target, rows).items():
                self._keep_furthest(jobs[index], some, scores)
            left = [job for job in left if job.outcome is None and job.verified < len(job)]
        left = [job for job in jobs if job.outcome is None]
        self._with_rivals(left, target, scores)
        for job in left:
            self._conclude(job, scores)

    def _with_rivals(self, jobs: list[Job], target: Target, scores: Scores) -> None:
        """Run prompts and rivals at every position of them, in shared passes."""
        self._lookalikes.look_up([token for job in jobs for token in job.ids.tolist()])
        longest = target.low.shape[1]
        asked = [(job, self._branches(job, scores, longest)) for job in jobs]
        every = [(job, branches) for job, branches in asked if branches is not None]
        size = max(1, _BATCH_TOKENS // (2 * longest))
        for start in range(0, len(every), size):
            some = every[start : start + size]
            ids = pad_sequence([job.ids for job, _ in some], batch_first=True)
            places, tokens = (
                pad_sequence(list(column), batch_first=True)
                for column in zip(*(branches for _, branches in some), strict=True)
            )
            states = states_of_branches(self._model, self._verifier.tap, ids, places, tokens)
            trunk, rivals = map(self._verifier.observe, states)
            rows = torch.tensor([[job.index] for job, _ in some])
            distances = target[rows[:, 0], : ids.shape[1]].away(trunk).tolist()
            others = target[rows, places].away(rivals).cpu()
            for (job, branches), away, beside in zip(some, distances, others, strict=True):
                if job.verified < len(job):
                    self._settle(job, job.ids, away[: len(job)])
                job.note_rivals(*branches, beside[: len(branches[0])])

    def _next_rows(self, job: Job, scores: Scores) -> list[Tensor] | Tensor:
        """The rows to run next for a prompt, or the tokens to try at its mismatch; none when it has ended."""
        at = job.verified
        fits = job.nearest(at) is not None  # a rival that was tried beside the pass
        try:
            if job.distances:  # the first pass is made in any case
                job.budget.check(0 if fits else 1)
            if not job.tested.get(at):  # the rest of the proposal was not run yet behind what is verified
                return [job.affordable(len(job))]
            if self._fits_plainly(job):
                self._run_alone(job, scores)
                return []
            if fits or job.stage == len(_LADDER):
                return [job.ids] if self._repair(job, scores) else []
        except BudgetSpentError as spent:
            self._stop(job, spent)
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

    # What both share.

    def _repair(self, job: Job, scores: Scores) -> bool:
        """Put the right token at the first mismatch; False where a search decided the prompt instead."""
        at = job.verified
        token = job.nearest(at)  # a rival that was tried beside the pass
        if token is None:
            token = self._try_candidates(job, scores, at)
        reach = job.target.reaches[at]
        may_fit = {other for other, distance in job.tested[at].items() if distance <= reach}
        if token is None and self._hands_on(job, at == job.known):
            self._pass_on(job)
            return False
        if token is None or may_fit - {token, *self._lookalikes.twins(token)}:
            self._search(job, scores, at)  # nothing fits, or several tokens may: a matter of alternatives
            return False
        job.put(at, token)
        return True

    def _try_candidates(self, job: Job, scores: Scores, at: int) -> int | None:
        """Try tokens on the cached prefix until one fits; the nearest of its batch, None when none does."""
        prefix = job.prefix_at(at)
        known = job.tested.setdefault(at, {})
        tested = distances_of(known, self._model.vocab_size)
        first = by_device(_FIRST_BATCH, self._model.device)
        order = partial(job.expected_order, at, scores)
        ranked = RankedPolicy(scores.order(job.index, at), first, prefix.max_candidates, order)
        policy = self._repair_policy(prefix, job.observed[at], ranked)
        nearest: int | None = None
        most = self._model.vocab_size
        if self._hands_on(job, at == job.known):
            most = min(most, by_device(_PATIENCE, self._model.device))
        while nearest is None and len(known) < most and len(ids := policy.propose(torch.isinf(tested))):
            ids = ids[: job.budget.tests_left]
            if at == 0 and len(known) > _SCANNED:  # the same for every prompt: computed once
                first_states(self._model, self._verifier.tap, patiently=True)
            self._verifier.test(prefix, ids, job.target[at], tested, job.budget)
            known.update(zip(ids.tolist(), tested[ids].tolist(), strict=True))
            nearest = job.nearest(at)
        return nearest

    def _hands_on(self, job: Job, at_once: bool = False) -> bool:
        """Whether evidence is asked before a scan: where not even the first token fits, and where what is
        allowed is as wide as in half precision, or in few bits.
        """
        return self._hand_on and (at_once or self._is_coarse(job))

    def _is_coarse(self, job: Job) -> bool:
        return torch.finfo(self._model.dtype).eps > 1e-4 or job.target.coarse > 0

    def _pass_on(self, job: Job) -> None:
        verified = job.fits(min(job.verified, len(job.distances)), self._lookalikes)
        job.outcome = Outcome((), verified, None, "", handed_on=True)

    def _fits_plainly(self, job: Job) -> bool:
        """Whether the nearest refused token fits in a plain pass over the whole prompt.

        States of attention sinks are so long that another shape of the pass, cached or shared, can move them
        out of the radius. The plain pass decides anyway; such a prompt is run plainly from then on.
        """
        at, refused = job.verified, job.tested.get(job.verified)
        if job.plainly or not refused or job.nearest(at) is not None:
            return False
        token = min(refused, key=refused.__getitem__)
        near = _PLAINLY if self._is_coarse(job) else BACKOFF_RADII
        if refused[token] > near * job.target.radii[at]:
            return False
        ids = replaced(job.ids, at, token)
        distance = self._verifier.whole_sequence(ids.tolist(), job.target)[at]
        job.budget.tests += 1
        if not distance <= job.target.radii[at]:
            return False
        job.put(at, token)
        job.plainly = True
        return True

    def _conclude(self, job: Job, scores: Scores) -> None:
        """Every position is verified: it is the prompt where at every position all other tokens are far."""
        try:
            if self._hands_on(job) and self._apart.unclear(job, scores, len(job)):
                self._pass_on(job)
                return
            open_ = self._apart.first_open(job, scores, len(job))
        except BudgetSpentError as spent:
            self._stop(job, spent)
            return
        if open_ is not None:
            self._search(job, scores, open_)
            return
        alone = self._lookalikes.unmistakable(job.ids.tolist())
        prompt = VerifiedPrompt(job.positions(len(job))) if alone else job.fits(len(job), self._lookalikes)
        job.outcome = Outcome((prompt,), prompt, None, "")

    def _stop(self, job: Job, spent: BudgetSpentError) -> None:
        at = min(job.verified, len(job.distances))
        fits = job.fits(at, self._lookalikes)
        whole = (fits,) if at == len(job) else ()
        job.outcome = Outcome(whole, fits, None, f"Stopped at position {at}: {spent}.", undecided=True)

    def _search(self, job: Job, scores: Scores, start: int) -> None:
        """Decide a prompt by a search from a position on, or from an earlier one that is not clear either."""
        if self._hands_on(job):
            self._pass_on(job)
            return
        try:
            job.budget.check(0)
            if start and not job.runners_up:
                earlier = self._apart.first_open(job, scores, start)
                start = start if earlier is None else earlier
        except BudgetSpentError as spent:
            self._stop(job, spent)
            return

        def policy(position: int) -> Policy:
            return RankedPolicy(scores.order(job.index, position), 16, job.prefix.max_candidates)

        prefix = job.prefix_at(start)
        refused = {start: job.tested.get(start, {})}
        search = Search(job.target, prefix, self._verifier, policy, self._lookalikes, job.budget, refused)
        fits = job.fits(job.verified, self._lookalikes)
        frames = [Frame(fit, job.other_fits(fit, self._lookalikes)) for fit in fits]
        known = [Frame(frame.chosen) for frame in frames[:start]]
        job.outcome = search.run(known, frames if job.verified == len(job) else ())
