"""One prompt in passes of its own, on the keys and values they leave behind; and what a pass does to any.

What a pass verifies from the left is settled. Where proposals are in doubt, candidates for all of them run
beside the prompt in one pass and the nearest are taken (``guessing``). Where guesses do not help, candidates
are tried at the first mismatch in the proposer's order, up to the whole vocabulary (``repairing``).
"""

from __future__ import annotations

from torch import Tensor

from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.budget import BudgetSpentError
from preimage.inversion.engine.guessing import Guessing
from preimage.inversion.engine.jobs import LONG, Branches, Job
from preimage.inversion.engine.repairing import Repairing
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.scores import Scores
from preimage.progress import settled

_WHOLE_REPAIRS = 1  # with more repairs a prompt is run from its first mismatch on, and whole at last


class Alone:
    """Inverts one prompt after another, for one model and layer."""

    def __init__(
        self, verifier: Verifier, apart: Apartness, guessing: Guessing, repairing: Repairing
    ) -> None:
        self._verifier, self._apart = verifier, apart
        self._guessing, self._repairing = guessing, repairing

    def run(self, job: Job, scores: Scores) -> None:
        """Run a prompt to its end."""
        whole, job.shared = True, False
        try:
            while job.outcome is None:
                job.check_budget()
                if self.guesses(job):
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
                    not self.guesses(job) and self._repairing.repair(job, scores)
                ):
                    whole = len(job.repaired) <= _WHOLE_REPAIRS
        except BudgetSpentError as spent:
            self._repairing.stop(job, spent)

    def _pass(self, job: Job, scores: Scores, start: int) -> None:
        """Run a prompt from a position on; what agrees from the left is settled."""
        row = job.row_from(start)
        branches = None if start or job.plainly else self.branches(job, scores, LONG)
        if job.plainly:
            distances = self._verifier.whole_sequence(row.tolist(), job.target[: len(row)])
        elif branches is not None:
            states, rivals = map(self._verifier.observe, job.run_with_branches(row, 0, *branches))
            distances = job.target.away(states).tolist()
        else:
            seen = self._verifier.observe(job.extend_prefix(row, start))
            distances = job.distances[:start] + job.target[start : len(row)].away(seen).tolist()
        self.settle(job, row, distances)
        if branches is not None:
            self.note(job, branches, job.target[branches[0].tolist()].away(rivals).cpu())

    def _guess(self, job: Job, scores: Scores) -> None:
        """Run a prompt from its first mismatch on, with candidates for all positions in doubt."""
        start, end = job.verified, len(job)
        if end > LONG:
            end = len(job.row_from(start))
        branches = self._guessing.branches(job, scores, end)
        row = job.ids[:end]
        states, others = map(self._verifier.observe, job.run_with_branches(row, start, *branches))
        self.settle(job, row, job.distances[:start] + job.target[start:end].away(states).tolist())
        self.note(job, branches, job.target[branches[0].tolist()].away(others).cpu())
        self.take_fitting(job, scores)

    def guesses(self, job: Job) -> bool:
        """Whether candidates for several doubtful positions are run together next."""
        return not self._repairing.is_coarse(job) and self._guessing.is_worth(job)

    def take_fitting(self, job: Job, scores: Scores) -> None:
        """Put a token that was tried at the first mismatch and fits there, plainly or not."""
        if job.verified == len(job.distances) or self._repairing.fits_plainly(job):
            return
        if job.nearest(job.verified) is not None:
            self._repairing.repair(job, scores)

    def note(self, job: Job, branches: Branches, distances: Tensor) -> None:
        """Take in what was tried beside a prompt."""
        job.note_rivals(*branches, distances)
        self._guessing.note(job, *branches, distances)

    def settle(self, job: Job, row: Tensor, distances: list[float]) -> None:
        """Take in how far the tokens of a row are from what was observed, from the left."""
        before, job.distances = job.verified, distances
        job.verified = job.agreeing(row, distances)
        settled(job.ids.tolist, job.verified)
        job.refuse(row, job.verified, distances)
        job.count_tests(before, job.verified, len(row))

    def branches(self, job: Job, scores: Scores, longest: int) -> Branches | None:
        """The rivals to run beside a whole prompt; None where they are better tried later, or not at all."""
        if len(job) > longest or not self._apart.takes_branches(len(job)):
            return None
        branches = self._apart.branches(job, scores, len(job))
        branches = self._guessing.beside(job, *branches)
        enough = job.budget.tests_left >= len(job) + len(branches[0])
        return branches if enough and 0 < len(branches[0]) <= 2 * max(longest, len(job)) else None
