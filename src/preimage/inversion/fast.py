"""Exact inversion in passes: propose every position, verify in one pass, repair the first mismatch, go on.

What a pass verifies from the left is settled. On a GPU many prompts share a pass, and at a mismatch the next
candidates are tried in whole rows, so that a right guess verifies the rest at once. On a CPU prompts go one
by one, and the mismatch is repaired by a batch of single tokens on the keys and values the pass left behind.
In both, candidates follow the proposer's order, in growing batches up to the whole vocabulary, and the last
pass runs over the whole prompt and verifies every position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.distances import norms, row_distances
from preimage.inversion.budget import Budget, BudgetSpentError
from preimage.inversion.policies import Policy, RankedPolicy
from preimage.inversion.proposers import Proposer
from preimage.inversion.readings import Reading
from preimage.inversion.search import BACKOFF_TOLERANCES, Fit, Frame, Outcome, Search, Verified
from preimage.inversion.twins import Rivals
from preimage.inversion.verifier import Verifier
from preimage.models import LanguageModel, Prefix
from preimage.results import Positions

# Candidates tried in rows of their own on a GPU, round after round, before a cached prefix: the first with
# the rest of the prompt behind them, which a right guess verifies too, the others up to the mismatch only.
_LADDER = (2, 16, 64)
_FIRST_BATCH = {"cpu": 8, "cuda": 512}  # candidates tried first on a cached prefix
_BATCH_TOKENS = 16384  # tokens of one pass
_WHOLE_REPAIRS = (
    1  # a prompt with more repairs than this is run from its first mismatch on, and whole at last
)

# From the prefix, the observed state and the proposer's policy to the policy of a repair.
RepairPolicy: TypeAlias = Callable[[Prefix, Tensor, Policy], Policy]


@dataclass
class Job:
    """One prompt on its way."""

    index: int
    observed: Float[Tensor, "position d_model"]
    tolerances: list[float]
    ids: Int[Tensor, " position"]  # the proposal; its first ``verified`` tokens are settled
    budget: Budget
    make_prefix: Callable[[], Prefix]
    verified: int = 0
    refused: dict[int, dict[int, float]] = field(default_factory=dict)  # position -> token -> distance
    distances: list[float] = field(default_factory=list)
    repairs: int = 0
    stage: int = 0  # rounds spent on the first mismatch
    plainly: bool = False  # whether only plain passes over the whole prompt are near enough to the states
    outcome: Outcome | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def affordable(self, end: int, rows: int = 1) -> Int[Tensor, " some"]:
        """The proposal up to a position, no longer than what so many rows of it may still test."""
        return self.ids[: min(end, self.verified + max(1, self.budget.tests_left // rows))]

    @cached_property
    def prefix(self) -> Prefix:
        """Where its mismatches are repaired."""
        return self.make_prefix()


class FastInverter:
    """Inverts prompts, together (on a GPU) or one by one; ``repair`` may change the order of candidates."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        proposer: Proposer,
        repair: RepairPolicy = lambda prefix, observed, ranked: ranked,
        together: bool | None = None,
    ) -> None:
        self._model = model
        self._verifier = verifier
        self._proposer = proposer
        self._repair_policy = repair
        self._rivals = Rivals(model)
        self._together = model.device.type != "cpu" if together is None else together

    def run(self, observed: Sequence[Float[Tensor, "_ d_model"]], budgets: Sequence[Budget]) -> list[Outcome]:
        """One outcome a prompt; prompts may differ in length."""
        with torch.inference_mode():
            lengths = torch.tensor([len(states) for states in observed], device=self._model.device)
            padded = pad_sequence(list(observed), batch_first=True).to(self._model.device)
            valid = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
            reading = self._proposer.read(padded, valid)
            jobs = self._jobs(padded, reading, lengths.tolist(), budgets)
            if self._together:
                self._run_together(jobs, padded, reading)
            else:
                for job in jobs:
                    self._run_alone(job, reading)
        return [job.outcome for job in jobs]  # type: ignore[misc]  # every job has ended

    def _jobs(
        self, padded: Tensor, reading: Reading, lengths: list[int], budgets: Sequence[Budget]
    ) -> list[Job]:
        ids = reading.best().cpu()
        make_prefix = partial(self._model.prefix, self._verifier.layer)
        tolerances = (self._verifier.relative * norms(padded)).tolist()
        return [
            Job(i, padded[i, :n], tolerances[i][:n], ids[i, :n], budget, make_prefix)
            for i, (n, budget) in enumerate(zip(lengths, budgets, strict=True))
        ]  # fmt: skip

    # One prompt, on the keys and values its passes leave behind.

    def _run_alone(self, job: Job, reading: Reading) -> None:
        whole = True
        try:
            while job.outcome is None:
                job.budget.check()
                self._pass(job, 0 if whole else job.verified)
                if job.verified == len(job):
                    if whole:
                        self._conclude(job, reading)
                    whole = True
                    continue
                job.budget.check()
                if self._fits_plainly(job) or self._repair(job, reading):
                    whole = job.repairs <= _WHOLE_REPAIRS
        except BudgetSpentError as spent:
            self._stop(job, spent)

    def _pass(self, job: Job, start: int) -> None:
        """Run a prompt from a position on; what agrees from the left is settled."""
        row = job.ids if job.verified == len(job) else job.affordable(len(job))
        if job.plainly:
            job.distances = self._verifier.whole_sequence(row.tolist(), job.observed[: len(row)])
        else:
            job.prefix.crop(start)
            seen = self._verifier.observe(job.prefix.extend(row[start:]))
            job.distances = (
                job.distances[:start] + row_distances(seen, job.observed[start : len(row)]).tolist()
            )
        before = job.verified
        job.verified = self._note_refusal(job, row, job.distances)
        job.budget.tests += max(0, job.verified - before) + (job.verified < len(row))

    # Many prompts in shared passes.

    def _run_together(self, jobs: list[Job], padded: Tensor, reading: Reading) -> None:
        rows = {job.index: [job.affordable(len(job))] for job in jobs}
        while rows:
            self._round(jobs, padded, rows, reading)
            following = {job.index: self._next(job, reading) for job in jobs if job.outcome is None}
            rows = {index: some for index, some in following.items() if some}

    def _round(
        self, jobs: list[Job], padded: Tensor, rows: dict[int, list[Tensor]], reading: Reading
    ) -> None:
        """Run every row of every open prompt and keep, for each prompt, the one that gets furthest."""
        layer = self._verifier.layer
        every = [(index, row) for index, some in rows.items() for row in some]
        every.sort(key=lambda item: len(item[1]))  # rows of about one length share a pass
        found: dict[int, list[tuple[int, Tensor, list[float]]]] = {index: [] for index in rows}
        size = max(1, _BATCH_TOKENS // padded.shape[1])
        for start in range(0, len(every), size):
            part = every[start : start + size]
            mine = [index for index, _ in part]
            ids = pad_sequence([row for _, row in part], batch_first=True)
            seen = self._verifier.observe(self._model.states(ids, (layer,))[layer])
            distances = row_distances(seen, padded[mine, : ids.shape[1]]).tolist()
            for (index, row), away in zip(part, distances, strict=True):
                job = jobs[index]
                reach = self._note_refusal(job, row, away)
                job.budget.tests += max(0, reach - job.verified) + (reach < len(row))
                found[index].append((reach, row, away[: len(row)]))
        for index, some in found.items():
            job = jobs[index]
            reach, row, away = max(some, key=lambda one: one[0])
            if reach > job.verified or not job.distances:
                job.ids = torch.cat([row, job.ids[len(row) :]])
                job.verified, job.distances, job.stage = reach, away, 0
            elif reach < job.verified:  # what one shape of a pass verified another did not: noise
                self._run_alone(job, reading)

    def _next(self, job: Job, reading: Reading) -> list[Tensor]:
        """The rows to run next for a prompt; none when it has ended."""
        at = job.verified
        if at == len(job):
            self._conclude(job, reading)
            return []
        refused = job.refused.get(at)
        try:
            job.budget.check()
            if not refused:  # the rest of the proposal was not run yet behind what is verified
                return [job.affordable(len(job))]
            if self._fits_plainly(job):
                self._run_alone(job, reading)
                return []
            if job.stage == len(_LADDER):
                return [job.ids] if self._repair(job, reading) else []
        except BudgetSpentError as spent:
            self._stop(job, spent)
            return []
        count = min(_LADDER[job.stage], job.budget.tests_left)
        row = job.affordable(len(job) if job.stage == 0 else at + 1, count)
        job.stage += 1
        fresh = [t for t in reading.top(job.index, at, len(refused) + count) if t not in refused]
        return [_replaced(row, at, token) for token in fresh[:count]] or self._next(job, reading)

    # What both share.

    def _note_refusal(self, job: Job, ids: Tensor, distances: list[float]) -> int:
        """How many positions agree, counted from the left; the next token is refused."""
        for position, (distance, tolerance) in enumerate(
            zip(distances[: len(ids)], job.tolerances, strict=False)
        ):
            if not distance <= tolerance:
                job.refused.setdefault(position, {})[int(ids[position])] = distance
                return position
        return len(ids)

    def _repair(self, job: Job, reading: Reading) -> bool:
        """Find the token of the first mismatch on the cached prefix; False where the prompt ends there."""
        at, tolerance, prefix = job.verified, job.tolerances[job.verified], job.prefix
        prefix.crop(at)
        if len(prefix) < at:
            prefix.extend(job.ids[len(prefix) : at])
        refused, twins, near = job.refused.setdefault(at, {}), self._rivals.twins, self._rivals.near
        fits: list[int] = []
        tested = torch.full((self._model.vocab_size,), math.inf, dtype=torch.float64)
        tested[list(refused)] = torch.tensor(list(refused.values()), dtype=torch.float64)
        first = _FIRST_BATCH.get(self._model.device.type, _FIRST_BATCH["cpu"])
        ranked = RankedPolicy(reading.order(job.index, at), first, prefix.max_candidates)
        policy = self._repair_policy(prefix, job.observed[at], ranked)
        nearest: int | None = None
        while nearest is None and len(ids := policy.propose(torch.isinf(tested))):
            job.budget.check()
            ids = ids[: job.budget.tests_left]
            distances = self._verifier.distances(prefix, ids, job.observed[at])
            tested[ids] = distances
            job.budget.tests += len(ids)
            refused.update(
                (t, d) for t, d in zip(ids.tolist(), distances.tolist(), strict=True) if not d <= tolerance
            )
            fits = ids[distances <= tolerance].tolist()
            nearest = int(ids[distances.argmin()]) if fits else None
        if nearest is None or set(fits) - {nearest, *twins(nearest), *near(nearest)}:
            # nothing fits, or tokens that are not alike do: a matter of alternatives
            search = self._search(job, reading)
            search.begin([Frame(fit) for fit in self._fits(job, at)])
            job.outcome = search.run()
            return False
        job.ids, job.stage = _replaced(job.ids, at, nearest), 0
        job.repairs += 1
        return True

    def _fits_plainly(self, job: Job) -> bool:
        """Whether the nearest refused token fits in a plain pass over the whole prompt.

        States of attention sinks are so long that another shape of the pass, cached or shared, can move them
        out of tolerance. The plain pass has the final word anyway; from here on it has every word.
        """
        at, refused = job.verified, job.refused.get(job.verified)
        if job.plainly or not refused:
            return False
        token = min(refused, key=refused.__getitem__)
        if refused[token] > BACKOFF_TOLERANCES * job.tolerances[at]:
            return False
        ids = _replaced(job.ids, at, token)
        distance = self._verifier.whole_sequence(ids.tolist(), job.observed)[at]
        job.budget.tests += 1
        if not distance <= job.tolerances[at]:
            return False
        job.ids, job.plainly, job.stage = ids, True, 0
        job.repairs += 1
        return True

    def _conclude(self, job: Job, reading: Reading) -> None:
        """Every position is verified; prompts with tokens of almost the same embedding may fit as well."""
        if self._rivals.unmistakable(job.ids.tolist()):
            alone = Verified(self._positions(job, len(job)))
            job.outcome = Outcome((alone,), alone, None, "")
            return
        fits = self._fits(job, len(job))
        near = [self._rivals.near(fit.position.token_id) for fit in fits]
        frames = [
            Frame(fit, [Fit(fit.position._replace(token_id=t), self._rivals.twins(t)) for t in others])
            for fit, others in zip(fits, near, strict=True)
        ]
        search = self._search(job, reading)
        search.begin(frames)
        complete: list[tuple[Fit, ...]] = []
        search.conclude(complete)
        job.outcome = search.outcome(tuple(complete))

    def _stop(self, job: Job, spent: BudgetSpentError) -> None:
        at = min(job.verified, len(job.distances))
        job.outcome = Outcome((), self._fits(job, at), None, f"Stopped at position {at}: {spent}.")

    def _search(self, job: Job, reading: Reading) -> Search:
        """A search behind the verified part of a prompt, in the proposer's order."""

        def policy(position: int) -> Policy:
            return RankedPolicy(reading.order(job.index, position), 16, job.prefix.max_candidates)

        return Search(job.observed, job.prefix, self._verifier, policy, self._rivals, job.budget, job.refused)

    def _positions(self, job: Job, count: int) -> Positions:
        tests = {index: 1 + len(refused) for index, refused in job.refused.items()}
        return Positions(job.ids[:count].tolist(), job.distances[:count], job.tolerances[:count], tests)

    def _fits(self, job: Job, count: int) -> tuple[Fit, ...]:
        """The first positions, as they were verified."""
        positions = self._positions(job, count)
        return tuple(Fit(position, self._rivals.twins(position.token_id)) for position in positions)


def _replaced(ids: Int[Tensor, " position"], at: int, token: int) -> Int[Tensor, " position"]:
    row = ids.clone()
    row[at] = token
    return row
