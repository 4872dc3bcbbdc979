"""The search over positions: accept, keep alternatives, back off, check the whole.

One position after another (Algorithm 1). Where several tokens fit, the nearest is followed first and the
others are kept; a dead end later on goes back to them, and so does the end of the prompt, to find out
whether another prompt fits as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.budget import Budget, BudgetSpentError
from preimage.inversion.policies import Policy
from preimage.inversion.twins import Rivals
from preimage.inversion.verifier import Trial, Verifier
from preimage.results import Position, Positions

MAX_PROMPTS = 64  # fitting prompts listed
# Nothing within tolerance, but one token far nearer than every other: the step was noisier than the floor
# (another shape, another device). It is followed, and the whole-sequence pass decides.
BACKOFF_TOLERANCES = 64.0
_BACKOFF_RATIO = 8.0


class Fit(NamedTuple):
    """A token that fits at a position, and the bit-identical embeddings that fit just as well."""

    position: Position
    twins: tuple[int, ...]


class Verified(Sequence[Fit]):
    """A prompt of which every position is verified and no token has a twin; each is made when looked at."""

    def __init__(self, positions: Positions) -> None:
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
    """A decided position and what else would have fitted there."""

    chosen: Fit
    others: list[Fit] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """What the search found: complete prompts, or where it failed."""

    hypotheses: tuple[Sequence[Fit], ...]
    partial: Sequence[Fit]
    failure: Position | None
    reason: str
    undecided: bool = False  # the budget ended before every alternative was followed


class Search:
    """One prompt's search. ``policy`` makes a fresh policy for a position."""

    def __init__(
        self,
        observed: Float[Tensor, "position d"],
        prefix: Trial,
        verifier: Verifier,
        policy: Callable[[int], Policy],
        rivals: Rivals,
        budget: Budget,
        refused: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        self._observed = observed
        self._prefix = prefix
        self._verifier = verifier
        self._policy = policy
        self._rivals = rivals
        self._budget = budget
        self._refused = refused or {}  # position -> token -> distance, of tests made elsewhere
        self._tolerances = verifier.tolerances(observed)
        self.frames: list[Frame] = []
        self._partial: tuple[Fit, ...] = ()
        self._failure: Position | None = None
        self._reason = ""

    def run(self) -> Outcome:
        """Search until every alternative is decided or the budget is spent."""
        complete: list[tuple[Fit, ...]] = []
        undecided = False
        try:
            while True:
                if len(self.frames) == len(self._observed):
                    self.conclude(complete)
                elif self.decide(len(self.frames)):
                    continue
                if len(complete) >= MAX_PROMPTS or not self._back_up():
                    break
        except BudgetSpentError as spent:
            undecided = True
            self._reason = f"Stopped at position {len(self.frames)}: {spent}."
            if not complete:
                self._remember_partial()
        return self.outcome(tuple(complete), undecided)

    def begin(self, known: Sequence[Frame]) -> None:
        """Start behind positions that are decided already; the prefix must hold them."""
        self.frames = list(known)

    def outcome(self, complete: tuple[tuple[Fit, ...], ...], undecided: bool = False) -> Outcome:
        """What was found so far."""
        return Outcome(complete, self._partial, self._failure, self._reason, undecided)

    def conclude(self, complete: list[tuple[Fit, ...]]) -> None:
        """Check a full prompt as a whole; then the prompts that differ from it by alternatives alone.

        Those need no search: whether they fit takes one pass each. An alternative that fits is decided;
        one that does not may still have another continuation, and is left to the search.
        """
        if not self._whole_sequence_fits():
            return
        choices = [(frame.chosen, *frame.others) for frame in self.frames]
        decided: set[int] = set()
        for fits in itertools.islice(itertools.product(*choices), MAX_PROMPTS):
            ids = [fit.position.token_id for fit in fits]
            if not self._misfits(ids):
                complete.append(fits)
                decided.update(map(id, fits))
        for frame in self.frames:
            frame.others = [fit for fit in frame.others if id(fit) not in decided]

    def decide(self, index: int) -> bool:
        """Find what fits at a position and step onto the nearest; False at a dead end."""
        fits, nearest = self._solve(index)
        if not fits and self._stands_out(nearest):
            fits = [Fit(nearest, self._rivals.twins(nearest.token_id))]
            self._verifier.distances(self._prefix, torch.tensor([nearest.token_id]), self._observed[index])
        if not fits:
            self._fail(nearest, "No token of the vocabulary fits")
            return False
        self._prefix.keep(0)
        self.frames.append(Frame(fits[0], fits[1:]))
        return True

    def _solve(self, index: int) -> tuple[list[Fit], Position]:
        """Test proposals until one fits, then its rivals; the winner is row 0 of the latest trial."""
        observed, tolerance = self._observed[index], self._tolerances[index]
        tested = torch.full((self._rivals.vocab_size,), math.inf, dtype=torch.float64)
        for token, distance in self._refused.get(index, {}).items():
            tested[token] = distance
        policy = self._policy(index)
        while True:
            ids = policy.propose(torch.isinf(tested))
            if len(ids) == 0:
                break
            self._test(ids, observed, tested)
            if float(tested.min()) <= tolerance:
                self._test_rivals(observed, tested)
                break
        order = tested.argsort()
        count = int(torch.isfinite(tested).sum())
        ranked = [
            _position(index, int(token), tested, tolerance, order, count)
            for token in order[: max(1, int((tested <= tolerance).sum()))]
        ]
        fits: list[Fit] = []
        for position in ranked:
            known = any(position.token_id in fit.twins for fit in fits)
            if position.accepted and not known:
                fits.append(Fit(position, self._rivals.twins(position.token_id)))
        return fits, ranked[0]

    def _test(self, ids: Tensor, observed: Tensor, tested: Tensor) -> None:
        for part in ids.split(self._prefix.max_candidates):
            self._budget.check()
            part = part[: self._budget.tests_left]
            tested[part] = self._verifier.distances(self._prefix, part, observed)
            self._budget.tests += len(part)

    def _test_rivals(self, observed: Tensor, tested: Tensor) -> None:
        """Test the tokens most like the accepted one, which is tried again as row 0 to be kept."""
        while True:
            winner = int(tested.argmin())
            rivals = self._rivals.of(winner, torch.isinf(tested))[: self._budget.tests_left]
            for part in rivals.split(max(1, self._prefix.max_candidates - 1)) or (rivals,):
                ids = torch.cat([part, torch.tensor([winner])]).roll(1)
                distances = self._verifier.distances(self._prefix, ids, observed)
                tested[part] = distances[1:]
                self._budget.tests += len(part)
            if int(tested.argmin()) == winner:
                return

    def _stands_out(self, nearest: Position) -> bool:
        """Whether the nearest token, though out of tolerance, is much nearer than every other."""
        rival = nearest.runner_up_distance
        return (
            nearest.distance <= BACKOFF_TOLERANCES * nearest.tolerance
            and rival is not None
            and nearest.distance * _BACKOFF_RATIO <= rival
        )

    def _whole_sequence_fits(self) -> bool:
        ids = [frame.chosen.position.token_id for frame in self.frames]
        outside = self._misfits(ids)
        if not outside:
            return True
        worst = max(outside, key=outside.__getitem__)
        chosen = self.frames[worst].chosen.position
        self._fail(
            Position(
                worst, chosen.token_id, outside[worst], chosen.tolerance, False,
                chosen.runner_up_id, chosen.runner_up_distance, chosen.tests,
            ),
            "The recovered prompt as a whole does not reproduce the state",
        )  # fmt: skip
        return False

    def _misfits(self, ids: list[int]) -> dict[int, float]:
        """Positions, and distances there, at which a whole prompt does not reproduce the states."""
        distances = self._verifier.whole_sequence(ids, self._observed)
        limits = self._tolerances
        return {i: distance for i, distance in enumerate(distances) if not distance <= limits[i]}

    def _fail(self, position: Position, what: str) -> None:
        """Remember the dead end that got furthest."""
        if self._failure is None or position.index >= self._failure.index:
            self._failure = position
            self._reason = (
                f"{what} at position {position.index}: the nearest token, {position.token_id}, is "
                f"{position.distance:.4g} away and {position.tolerance:.4g} is allowed. The model, layer or "
                "BOS is another one, or the state was changed."
            )
            self._remember_partial()

    def _remember_partial(self) -> None:
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


def _position(
    index: int, token: int, tested: Tensor, tolerance: float, order: Tensor, count: int
) -> Position:
    other = next((int(o) for o in order[:2] if int(o) != token), None) if count > 1 else None
    return Position(
        index=index,
        token_id=token,
        distance=float(tested[token]),
        tolerance=tolerance,
        accepted=bool(tested[token] <= tolerance),
        runner_up_id=other,
        runner_up_distance=None if other is None else float(tested[other]),
        tests=count,
    )
