"""The search over positions: accept, keep alternatives, back off, check the whole.

One position after another (Algorithm 1). Where several tokens may fit, the nearest is followed first and the
others are kept; a dead end later on goes back to them, and so does the end of the prompt, to find out
whether another prompt fits as well. A position is decided by a few tests where tokens lie far apart compared
with the radius; everywhere else the whole vocabulary is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, islice, product, takewhile
from typing import NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.lookalikes import Lookalikes
from preimage.inversion.engine.policies import Policy
from preimage.inversion.engine.verifier import CandidatePrefix, Target, Verifier, distances_of
from preimage.inversion.result import Position, VerifiedPositions
from preimage.progress import settled

MAX_PROMPTS = 64  # fitting prompts listed
# Nothing within reach, but one token far nearer than every other: the step was noisier than the floor
# (another shape, another device). It is followed, and the whole-sequence pass decides.
BACKOFF_RADII = 64.0
_BACKOFF_RATIO = 8.0
# Tests spent on finding out whether more prompts fit than the first: so many vocabularies, so many at least.
_MORE, _MORE_AT_LEAST = 4, 4096


class Fit(NamedTuple):
    """A token that may fit at a position, and the bit-identical embeddings that fit just as well."""

    position: Position
    twins: tuple[int, ...]

    @property
    def name(self) -> int:
        """One token for it and all its twins."""
        return min((self.position.token_id, *self.twins))


class VerifiedPrompt(Sequence[Fit]):
    """A prompt of which every position is verified and no token has a twin; each is made when looked at."""

    def __init__(self, positions: VerifiedPositions) -> None:
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Fit: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fit]: ...
    def __getitem__(self, index: int | slice) -> Fit | Sequence[Fit]:
        if isinstance(index, slice):
            return tuple(Fit(position, ()) for position in self.positions[index])
        return Fit(self.positions[index], ())


@dataclass
class Frame:
    """A decided position and what else may fit there."""

    chosen: Fit
    others: list[Fit] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What the search found: complete prompts, or where it failed."""

    hypotheses: tuple[Sequence[Fit], ...]
    partial: Sequence[Fit]
    failure: Position | None
    reason: str
    undecided: bool = False  # not every alternative was followed
    handed_on: bool = False  # nothing fits at once: evidence is asked before the whole vocabulary is tried
    tried: str = ""  # of one vector for a whole prompt: which prompts were tried, in words
    read: tuple[tuple[int, float], ...] = ()  # the likeliest tokens where nothing fits, and how sure each is


class Search:
    """One prompt's search. ``policy`` makes a fresh policy for a position.

    ``exhaustive`` tries the whole vocabulary at every position, wherever tokens lie.
    """

    def __init__(
        self,
        target: Target,
        prefix: CandidatePrefix,
        verifier: Verifier,
        policy: Callable[[int], Policy],
        lookalikes: Lookalikes,
        budget: Budget,
        refused: Mapping[int, Mapping[int, float]] | None = None,
        *,
        exhaustive: bool = False,
    ) -> None:
        self._target, self._prefix, self._verifier = target, prefix, verifier
        self._policy, self._lookalikes, self._budget = policy, lookalikes, budget
        self._refused = dict(refused or {})  # position -> token -> distance, of tests made elsewhere
        self._exhaustive = exhaustive
        self.frames: list[Frame] = []
        self._fitting: dict[tuple[int, ...], tuple[Fit, ...]] = {}
        self._exchanged = False  # whether alternatives of a prompt that fits were exchanged
        self._tests_before = 0  # spent when the first prompt that fits was found
        self._likely: list[int] = []
        self._partial: tuple[Fit, ...] = ()
        self._failure: Position | None = None
        self._reason = ""

    def run(self, known: Sequence[Frame] = (), fitting: Sequence[Frame] = ()) -> Outcome:
        """Search behind decided positions, which the prefix holds, until every alternative is decided.

        ``fitting`` is a prompt that is known to fit: its tokens are tried first everywhere.
        """
        self.frames = list(known)
        if fitting:
            chosen = [frame.chosen for frame in fitting]
            self._likely = [fit.position.token_id for fit in chosen]
            self._fitting[tuple(fit.name for fit in chosen)] = tuple(chosen)
            self._exchange(fitting)
        undecided = False
        try:
            while True:
                settled(self._tokens, len(self.frames))
                if len(self.frames) == len(self._target):
                    self._conclude()
                elif self._step(len(self.frames)):
                    continue
                if len(self._fitting) >= MAX_PROMPTS:
                    undecided = any(frame.others for frame in self.frames)
                    self._reason = f"Stopped after {len(self._fitting)} prompts that fit; more may."
                    break
                if not self._back_up():
                    break
        except BudgetSpentError as spent:
            undecided = True
            self._reason = f"Stopped at position {len(self.frames)}: {spent}."
            if not self._fitting:
                self._partial = tuple(frame.chosen for frame in self.frames)
        prompts = tuple(self._fitting.values())
        partial = prompts[0] if prompts else self._partial
        return Outcome(prompts, partial, self._failure, self._reason, undecided)

    def _tokens(self) -> list[int]:
        """The tokens of the positions decided so far."""
        return [frame.chosen.position.token_id for frame in self.frames]

    def _conclude(self) -> None:
        """Check a full prompt as a whole; the first that fits, also with its alternatives exchanged.

        Whether those fit takes one pass each, so that they are listed even where the budget ends before the
        search has come to them. They stay alternatives: what may follow them is the search's to find out.
        """
        misfits = self._check([frame.chosen for frame in self.frames])
        if misfits:
            worst = max(misfits, key=misfits.__getitem__)
            position = self.frames[worst].chosen.position._replace(distance=misfits[worst], accepted=False)
            self._fail(position, "The recovered prompt as a whole does not reproduce the state")
        elif not self._exchanged:
            self._exchange(self.frames)

    def _exchange(self, frames: Sequence[Frame]) -> None:
        self._tests_before = self._budget.tests
        self._exchanged = any(frame.others for frame in frames)
        for fits in islice(_exchanged(frames), MAX_PROMPTS - len(self._fitting)):
            self._check(fits)

    def _check(self, fits: Sequence[Fit]) -> dict[int, float]:
        """Positions, and distances there, at which a whole prompt does not fit; one that does is kept."""
        ids = [fit.position.token_id for fit in fits]
        distances = self._verifier.whole_sequence(ids, self._target)
        radii = self._target.radii
        misfits = {i: distance for i, distance in enumerate(distances) if not distance <= radii[i]}
        if not misfits:
            checked = tuple(
                Fit(fit.position._replace(distance=distance, accepted=True), fit.twins)
                for fit, distance in zip(fits, distances, strict=True)
            )
            self._fitting.setdefault(tuple(fit.name for fit in fits), checked)
        return misfits

    def _step(self, index: int) -> bool:
        """Find what may fit at a position and step onto the nearest; False at a dead end."""
        nearest, reached = nearest_and_fits(index, self._test_position(index), self._target, self._lookalikes)
        fits = list(reached)
        if not fits and _stands_out(nearest):
            fits = [Fit(nearest, self._lookalikes.twins(nearest.token_id))]
        if not fits:
            self._fail(nearest, "No token of the vocabulary fits")
            return False
        self._prefix.extend(torch.tensor([fits[0].position.token_id]))
        self.frames.append(Frame(fits[0], fits[1:]))
        return True

    def _test_position(self, index: int) -> Float[Tensor, " vocabulary"]:
        """The distance of every token tested at a position, infinite where one was not.

        Proposals are tested until one may fit, then its rivals, then, where these are not far, all tokens.
        """
        target, reach = self._target[index], self._target.reaches[index]
        refused = self._refused.pop(index, {})  # behind the first prefix alone
        tested = distances_of(refused, self._lookalikes.vocab_size)
        if self._likely:
            first = torch.tensor(self._likely[index : index + 1])
            self._test(first[torch.isinf(tested[first])], target, tested)
        policy = self._policy(index)
        while not float(tested.min()) <= reach and len(ids := policy.propose(torch.isinf(tested))):
            self._test(ids, target, tested)
        if float(tested.min()) <= reach:
            self._test_rivals(target, tested)
            if self._exhaustive or not self._all_far(tested, reach, self._target.fars[index]):
                self._test(torch.isinf(tested).nonzero().flatten(), target, tested)
        return tested

    def _test(self, ids: Int[Tensor, " candidate"], target: Target, tested: Tensor) -> None:
        for part in ids.split(self._prefix.max_candidates) if len(ids) else ():
            self._budget.check()
            more = max(_MORE * len(tested), _MORE_AT_LEAST)
            if self._fitting and self._budget.tests - self._tests_before > more:
                raise BudgetSpentError(f"after {more} more tests it is open whether other prompts fit")
            self._verifier.test(self._prefix, part, target, tested, self._budget)

    def _test_rivals(self, target: Target, tested: Float[Tensor, " vocabulary"]) -> None:
        """Test the tokens most like the nearest one, and again if that shows a nearer one."""
        nearest = -1
        while nearest != int(tested.argmin()):
            nearest = int(tested.argmin())
            self._test(self._lookalikes.rivals(nearest, torch.isinf(tested)), target, tested)

    def _all_far(self, tested: Float[Tensor, " vocabulary"], reach: float, far: float) -> bool:
        """Whether other tokens were tested and all that are out of reach lie far out of it."""
        nearest = int(tested.argmin())
        near = self._lookalikes.near(nearest)
        known = torch.isfinite(tested).nonzero().flatten()
        others = {
            other: away
            for other, away in zip(known.tolist(), tested[known].tolist(), strict=True)
            if away > reach or other in near
        }
        return self._lookalikes.all_far(nearest, others, far)

    def _fail(self, position: Position, what: str) -> None:
        """Remember the dead end that got furthest."""
        if self._failure is None or position.index >= self._failure.index:
            self._failure = position
            self._reason = (
                f"{what} at position {position.index}: the nearest token, {position.token_id}, is "
                f"{position.distance:.4g} away and {position.radius:.4g} is allowed. The model, layer or "
                "BOS is another one, or the state was changed."
            )
            self._partial = tuple(frame.chosen for frame in self.frames)

    def _back_up(self) -> bool:
        """Go back to the latest position with an alternative and take it; False if there is none."""
        while self.frames:
            frame = self.frames.pop()
            if frame.others:
                self._prefix.crop(len(self.frames))
                follow = frame.others.pop(0)
                self._prefix.extend(torch.tensor([follow.position.token_id]))
                self.frames.append(Frame(follow, frame.others))
                return True
        return False


def nearest_and_fits(
    index: int, tested: Float[Tensor, " vocabulary"], target: Target, lookalikes: Lookalikes
) -> tuple[Position, Iterator[Fit]]:
    """The nearest token at a position, fitting or not; what may fit there, nearest first, twins as one."""
    ranked = _ranked_positions(index, tested, target)
    nearest = next(ranked)

    def fits() -> Iterator[Fit]:
        seen: set[int] = set()
        for position in takewhile(
            lambda one: one.distance <= target.reaches[index], chain([nearest], ranked)
        ):
            if position.token_id not in seen:
                twins = lookalikes.twins(position.token_id)
                seen.update(twins)
                yield Fit(position, twins)

    return nearest, fits()


def _ranked_positions(index: int, tested: Float[Tensor, " vocabulary"], target: Target) -> Iterator[Position]:
    """Every token tested at a position, nearest first.

    The runner-up of the nearest token is the second nearest, that of every other token the nearest.
    """
    order, tests, radius = tested.argsort(), int(torch.isfinite(tested).sum()), target.radii[index]
    for rank in range(len(order)):
        token = int(order[rank])
        other = None if tests < 2 else int(order[1] if rank == 0 else order[0])
        away = None if other is None else float(tested[other])
        accepted = bool(tested[token] <= radius)
        yield Position(index, token, float(tested[token]), radius, accepted, other, away, tests)


def _stands_out(nearest: Position) -> bool:
    """Whether the nearest token, though outside the radius, is much nearer than every other."""
    rival = nearest.runner_up_distance
    return (
        nearest.distance <= BACKOFF_RADII * nearest.radius
        and rival is not None
        and nearest.distance * _BACKOFF_RATIO <= rival
    )


def _exchanged(frames: Sequence[Frame]) -> Iterator[list[Fit]]:
    """The chosen prompt with one position exchanged for an alternative, with two, and so on."""
    chosen = [frame.chosen for frame in frames]
    open_ = [index for index, frame in enumerate(frames) if frame.others]
    for count in range(1, len(open_) + 1):
        for places in combinations(open_, count):
            for others in product(*(frames[place].others for place in places)):
                fits = list(chosen)
                for place, fit in zip(places, others, strict=True):
                    fits[place] = fit
                yield fits
