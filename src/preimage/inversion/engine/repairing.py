"""What is done where a pass does not settle a prompt: repairs, plain passes, searches; and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from preimage.devices import by_device
from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.budget import BudgetSpentError
from preimage.inversion.engine.first_states import first_states
from preimage.inversion.engine.jobs import Job, replaced
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.policies import Policy, RankedPolicy
from preimage.inversion.engine.search import Frame, Outcome, Search, VerifiedPrompt
from preimage.inversion.engine.tangent import LEADING, Descent, merged
from preimage.inversion.engine.verifier import Verifier, distances_of
from preimage.inversion.proposers.scores import Scores
from preimage.models import LanguageModel, Prefix

_FIRST_BATCH = {"cpu": 8, "cuda": 512}  # candidates tried first on a cached prefix
_SCANNED = 4096  # a vocabulary that is tried in full before evidence is asked
_PATIENCE = {"cpu": 256, "cuda": 2**31}  # candidates tried at the first position before evidence is asked
_PATIENCE_BEHIND = {"cpu": 256, "cuda": 4096}  # the same at later ones, where what is allowed is coarse
_MANY = 64  # refused tokens, of those the proposer ranks first, after which a better order is asked for
_OFTEN = 3  # positions between two tokens that the derivative led to, if it often has to
_PLAINLY = 2.0  # radii in half precision within which a token may fit in a plain pass alone

# From the prefix, the observed state and the proposer's policy to the policy of a repair.
RepairPolicy: TypeAlias = Callable[[Prefix, Tensor, Policy], Policy]


class Repairing:
    """Repairs, searches and conclusions for one model and layer; ``policy`` may change what is tried first.

    ``hand_on``: where nothing fits, evidence is asked before the vocabulary is tried in full.
    ``along_tangents``: the model's own derivative says what to try where the proposer does not know.
    """

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        apart: Apartness,
        policy: RepairPolicy,
        *,
        hand_on: bool,
        along_tangents: bool,
    ) -> None:
        self._model, self._verifier, self._apart, self._policy = model, verifier, apart, policy
        self._lookalikes = lookalikes_of(model)
        self._half = torch.finfo(model.dtype).eps > 1e-4
        self._hand_on = hand_on and model.vocab_size > _SCANNED
        self._along_tangents = along_tangents and model.vocab_size > _SCANNED

    def repair(self, job: Job, scores: Scores) -> bool:
        """Put the right token at the first mismatch; False where a search decided the prompt instead."""
        at = job.verified
        token, often = job.nearest(at), False  # a rival that was tried beside the pass
        if token is None:
            token, is_put = self._try_candidates(job, scores, at)
            if is_put:
                return True
            often = job.led and at - job.led_at <= _OFTEN
        reach = job.target.reaches[at]
        may_fit = {other for other, distance in job.tested[at].items() if distance <= reach}
        if token is None and self._hands_on(job, at == job.known):
            self._pass_on(job)
            return False
        if token is None or may_fit - {token, *self._lookalikes.twins(token)}:
            self._search(job, scores, at)  # nothing fits, or several tokens may: a matter of alternatives
            return False
        job.put(at, token)
        job.led_at = at if job.led else job.led_at
        if often and job.descent is not None:  # most proposals are wrong: the rest is found the same way
            job.ids = job.descent.read_on(job.ids, at + 1, job.budget)
        return True

    def _try_candidates(self, job: Job, scores: Scores, at: int) -> tuple[int | None, bool]:
        """Try tokens on the cached prefix until one fits: the nearest of its batch, None when none does.

        And whether one was put there because it fits in a plain pass.
        """
        prefix = job.prefix_at(at)
        known = job.tested.setdefault(at, {})
        tested = distances_of(known, self._model.vocab_size)
        first = by_device(_FIRST_BATCH, self._model.device)
        leading: set[int] = set()

        def better() -> Int[Tensor, " vocabulary"] | None:
            return merged(self._along_tangent(job, at, leading), job.expected_order(at, scores))

        along = self._along_tangent(job, at, leading) if job.led else None
        if along is None and len(known) >= _MANY:  # the proposer's order has failed already
            along = better()
        order = scores.order(job.index, at) if along is None else along
        ranked = RankedPolicy(order, first, prefix.max_candidates, better)
        policy = self._policy(prefix, job.observed[at], ranked)
        nearest: int | None = None
        most = self._model.vocab_size
        if self._hands_on(job, at == job.known):
            patience = _PATIENCE if at == job.known else _PATIENCE_BEHIND
            most = min(most, by_device(patience, self._model.device))
        while nearest is None and len(known) < most and len(ids := policy.propose(torch.isinf(tested))):
            ids = ids[: job.budget.tests_left]
            if at == 0 and len(known) > _SCANNED:  # the same for every prompt: computed once
                first_states(self._model, self._verifier.tap, patiently=True)
            self._verifier.test(prefix, ids, job.target[at], tested, job.budget)
            known.update(zip(ids.tolist(), tested[ids].tolist(), strict=True))
            nearest = job.nearest(at)
            if self.fits_plainly(job):
                return None, True
        job.led = nearest in leading
        return nearest, False

    def _along_tangent(self, job: Job, at: int, leading: set[int]) -> Int[Tensor, " vocabulary"] | None:
        """Every token as seen from some that were refused; what they lead to goes into ``leading``."""
        refused = job.tested.get(at)
        if not (self._along_tangents and at and refused):
            return None
        if job.descent is None:
            job.descent = Descent(self._model, self._verifier, job.observed, job.target)
        order = job.descent.order(job.ids[:at].tolist(), sorted(refused, key=refused.__getitem__))
        leading.update([] if order is None else order[:LEADING].tolist())
        return order

    def _hands_on(self, job: Job, at_once: bool = False) -> bool:
        """Whether evidence is asked before a scan: where not even the first token fits, and where what is
        allowed is as wide as in half precision, or in few bits.
        """
        return self._hand_on and (at_once or self.is_coarse(job))

    def is_coarse(self, job: Job) -> bool:
        """Whether what is allowed is as wide as in half precision, or in few bits."""
        return self._half or job.coarse

    def _pass_on(self, job: Job) -> None:
        verified = job.fits(min(job.verified, len(job.distances)), self._lookalikes)
        job.outcome = Outcome((), verified, None, "", handed_on=True)

    def fits_plainly(self, job: Job) -> bool:
        """Put the nearest refused token at the first mismatch if it fits in a plain pass over the prompt.

        States of attention sinks are so long that another shape of the pass, cached or shared, can move them
        out of the radius. The plain pass decides anyway; such a prompt is run plainly from then on. Where
        prompts share passes, a token is put there once untested: a large batch may do to decide.
        """
        at, token = job.verified, job.near_miss(job.verified)
        if token is None or (self.is_coarse(job) and job.tested[at][token] > _PLAINLY * job.target.radii[at]):
            return False
        job.looks[at] += 1
        if job.shared and job.looks[at] == 1 and token != int(job.ids[at]):
            job.put(at, token)
            return True
        ids = replaced(job.ids, at, token)
        distance = self._verifier.whole_sequence(ids.tolist(), job.target)[at]
        job.budget.tests += 1
        if not distance <= job.target.radii[at]:
            return False
        job.put(at, token)
        job.plainly = True
        return True

    def conclude(self, job: Job, scores: Scores) -> None:
        """Every position is verified: it is the prompt where at every position all other tokens are far."""
        try:
            if self._hands_on(job) and self._apart.unclear(job, scores, len(job)):
                self._pass_on(job)
                return
            open_ = self._apart.first_open(job, scores, len(job))
        except BudgetSpentError as spent:
            self.stop(job, spent)
            return
        if open_ is not None:
            self._search(job, scores, open_)
            return
        alone = self._lookalikes.without_twins(job.ids.tolist())
        prompt = VerifiedPrompt(job.positions(len(job))) if alone else job.fits(len(job), self._lookalikes)
        job.outcome = Outcome((prompt,), prompt, None, "")

    def stop(self, job: Job, spent: BudgetSpentError) -> None:
        """End a prompt whose budget is spent, with what was verified of it."""
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
            if start and not job.rivals:
                earlier = self._apart.first_open(job, scores, start)
                start = start if earlier is None else earlier
        except BudgetSpentError as spent:
            self.stop(job, spent)
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
