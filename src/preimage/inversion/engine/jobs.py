"""One prompt on its way through the fast engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.expectation import Expectation, likely_first, shared_tokens, together
from preimage.inversion.engine.lookalikes import Lookalikes
from preimage.inversion.engine.search import Fit, Outcome, VerifiedPrompt
from preimage.inversion.engine.tangent import Descent
from preimage.inversion.engine.verifier import ANOTHER_SHAPE, Target
from preimage.inversion.proposers.scores import Scores
from preimage.inversion.result import VerifiedPositions
from preimage.models import Prefix

Branches: TypeAlias = tuple[Int[Tensor, " _"], Int[Tensor, " _"]]  # positions, and tokens tried there

LONG = 512  # a prompt of more tokens is run apart from what is tried beside it, on a CPU
_LOOKS = 6  # at a position in other shapes of a pass
_ALONE = 4.0  # times as far as the nearest token are others where it may fit in another shape
_AHEAD, _LEAST_AHEAD = 4, 16  # times the usual distance between repairs, and positions, that are run at once


@dataclass(eq=False)
class Job:
    """One prompt on its way."""

    index: int
    observed: Float[Tensor, "position d_model"]
    targets: Target  # of all prompts, this one's at its index
    ids: Int[Tensor, " position"]  # the proposal; its first ``verified`` tokens are settled
    likely: Int[Tensor, "position few"]  # the likeliest tokens everywhere, and their chances
    chances: Float[Tensor, "position few"]
    budget: Budget
    make_prefix: Callable[[], Prefix]
    held: list[int] = field(default_factory=list)  # tokens of the cached prefix
    verified: int = 0
    # position -> token -> distance, of other tokens than the proposal's, up to the first mismatch
    tested: dict[int, dict[int, float]] = field(default_factory=dict)
    distances: list[float] = field(default_factory=list)
    rivals: list[int] = field(default_factory=list)  # the nearest other token everywhere, and how far it is
    rival_distances: list[float] = field(default_factory=list)
    others: list[dict[int, float]] = field(default_factory=list)  # other tokens that were tried everywhere
    tests: list[int] = field(default_factory=list)  # how many were tried everywhere
    repaired: set[int] = field(default_factory=set)  # positions whose token was found, and counted, apart
    closing: bool = False  # whether all is verified, and rivals were tried, or are next
    hurried: bool = False  # whether few are left beside it, so that many candidates cost no more than few
    stage: int = 0  # rounds spent on the first mismatch
    misses: float = 0.0  # how many proposals are wrong, as likely as they are
    instead: list[tuple[int, int]] = field(default_factory=list)  # where, and what is likely there instead
    doubts: list[int] = field(default_factory=list)  # positions behind it that are likely wrong as well
    tried: dict[int, int] = field(default_factory=dict)  # how many candidates were tried at such positions
    known: int = 0  # tokens before the first state that was observed: given, not looked for
    led: bool = False  # whether the model's derivative found the last token that was mended
    led_at: int = -(2**31)  # where it did so last
    descent: Descent | None = None  # what finds tokens so
    shared: bool = False  # whether it is looked at again in a large batch where it is off by little
    looks: Counter[int] = field(default_factory=Counter)  # how often a position was looked at in other shapes
    in_parts: bool = False  # whether what is verified was so in several passes, and in none as a whole
    plainly: bool = False  # whether only plain passes over the whole prompt are near enough to the states
    outcome: Outcome | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def second(self) -> Int[Tensor, " position"]:
        """The likeliest token everywhere beside the proposal; of one token, that one."""
        first, next_ = self.likely[:, 0], self.likely[:, min(1, self.likely.shape[1] - 1)]
        return torch.where(self.ids == first, next_, first)

    def affordable(self, end: int, rows: int = 1) -> Int[Tensor, " some"]:
        """The proposal up to a position, no longer than what so many rows of it may still test."""
        return self.ids[: min(end, self.verified + max(1, self.budget.tests_left // rows))]

    def row_from(self, start: int) -> Int[Tensor, " some"]:
        """What to run from a position on: all; of a prompt repaired often, not far past the next repair."""
        if self.verified == len(self):
            return self.ids
        ahead = max(_LEAST_AHEAD, _AHEAD * self.verified // max(1, len(self.repaired)))
        return self.affordable(min(len(self), start + ahead) if start else len(self))

    def check_budget(self) -> None:
        """Raise where the next pass may not be paid; one over nothing but tokens counted before is free."""
        counted = all(index in self.repaired for index in range(self.verified, len(self)))
        self.budget.check(0 if counted else 1)

    @cached_property
    def target(self) -> Target:
        """What its states are compared with."""
        return self.targets[self.index, : len(self)]

    @property
    def radii(self) -> list[float]:
        """The radius at each position."""
        return self.targets.radii_of_each[self.index]

    @property
    def coarse(self) -> bool:
        """Whether cells are so wide somewhere that a token far from them proves little."""
        return not self.targets.fine and self.target.coarse > 0

    @cached_property
    def prefix(self) -> Prefix:
        """Where its mismatches are repaired."""
        return self.make_prefix()

    @cached_property
    def _expecting(self) -> Expectation:
        return Expectation(self.prefix.model)

    def expected_order(self, at: int, scores: Scores) -> Int[Tensor, " vocabulary"] | None:
        """Every token, by scores and by what the model expects behind the verified ones.

        At first, by scores and by how prompts begin; None where nothing is expected.
        """
        own = scores.at(scores.row(self.index, at))[0].cpu()
        if at == 0:
            first = likely_first(self.prefix.model)
            ranks = torch.empty(len(first)).scatter_(0, first, torch.arange(len(first), dtype=torch.float32))
            return together(own, -(1 + ranks).log())
        expected = self._expecting.behind(self.ids[:at].tolist())
        return None if expected is None else together(own, expected.cpu())

    def extend_prefix(self, row: Int[Tensor, " position"], start: int) -> Float[Tensor, "some d_model"]:
        """Run a row from a position on, behind what the prefix holds up to there; the states of it."""
        self.prefix.crop(start)
        states = self.prefix.extend(row[start:])
        self.held = row.tolist()
        return states

    def run_with_branches(
        self,
        row: Int[Tensor, " position"],
        start: int,
        places: Int[Tensor, " branch"],
        tokens: Int[Tensor, " branch"],
    ) -> tuple[Float[Tensor, "some d_model"], Float[Tensor, "branch d_model"]]:
        """Run a row from a position on, and other tokens as branches off it.

        In one pass; a long row first, as attention over it is far quicker without a mask for branches.
        """
        if len(row) > LONG:
            states = self.extend_prefix(row, start)
            return states, self.prefix.try_at(places, tokens) if len(places) else states[:0]
        self.prefix.crop(start)
        both = self.prefix.extend_and_try(row[start:], places, tokens)
        self.held = row.tolist()
        return both

    def prefix_at(self, length: int) -> Prefix:
        """The cached prefix, holding just the first tokens of the prompt."""
        ids = self.ids[:length].tolist()
        shared = shared_tokens(ids, self.held)
        self.prefix.crop(shared)
        if shared < length:
            self.prefix.extend(self.ids[shared:length])
        self.held = ids
        return self.prefix

    def positions(self, count: int) -> VerifiedPositions:
        """The first positions, as they were verified."""
        tests = self.tests or [1 + len(self.tested.get(index, {})) for index in range(count)]
        columns = self.ids[:count].tolist(), self.distances[:count], self.radii[:count]
        return VerifiedPositions(*columns, tests[:count], self.rivals[:count], self.rival_distances[:count])

    def agreeing(self, row: Int[Tensor, " position"], distances: list[float]) -> int:
        """How many positions of a row agree with what was observed, counted from the left."""
        radii = self.radii
        misfits = (i for i, away in enumerate(distances[: len(row)]) if not away <= radii[i])
        return next(misfits, len(row))

    def carry_on(self, distances: list[float]) -> list[float]:
        """Distances of a pass; at verified positions, where it has them otherwise, those of earlier passes.

        On a GPU a pass of another size may move the states of attention sinks out of the radius.
        """
        self.in_parts = self.agreeing(self.ids, distances) < self.verified
        return self.distances[: self.verified] + distances[self.verified :] if self.in_parts else distances

    def refuse(self, row: Int[Tensor, " position"], at: int, distances: list[float]) -> None:
        """Keep that the token of a row at its first mismatch does not fit there."""
        if at < len(row):
            self.tested.setdefault(at, {})[int(row[at])] = distances[at]

    def put(self, at: int, token: int) -> None:
        """Take another token at a position; what was tested behind the old one is forgotten."""
        self.ids, self.stage = replaced(self.ids, at, token), 0
        self.tested = {index: tokens for index, tokens in self.tested.items() if index <= at}
        self.tested[at].pop(token, None)
        self.repaired = {index for index in self.repaired if index < at} | {at}

    def count_tests(self, before: int, verified: int, end: int) -> None:
        """Count what a pass up to ``end`` tested: tokens it verified, and the one it refused, each once."""
        fresh = sum(index not in self.repaired for index in range(before, verified))
        self.budget.tests += fresh + (verified < end)

    def note_rivals(self, places: Tensor, tokens: Tensor, distances: Tensor) -> None:
        """Keep the distances of tokens tried at settled positions and at the first mismatch."""
        for index, token, away in zip(places.tolist(), tokens.tolist(), distances.tolist(), strict=True):
            if index <= self.verified:  # behind a mismatch the prefix was another one, and nothing was tested
                self.tested.setdefault(index, {})[token] = away
                self.budget.tests += 1

    def conclude_at_once(
        self, distances: list[float], rivals: list[int], rival_distances: list[float], tried: list[int]
    ) -> None:
        """End with the proposal: one pass verified all of it, and at every position rivals are far."""
        self.verified, self.distances = len(self), distances
        self.rivals, self.rival_distances = rivals, rival_distances
        self.tests = [1 + count for count in tried]
        self.budget.tests += sum(self.tests)
        prompt = VerifiedPrompt(self.positions(len(self)))
        self.outcome = Outcome((prompt,), prompt, None, "")

    def weigh_rivals(self, count: int, lookalikes: Lookalikes) -> list[int]:
        """Find the nearest other token of every position; where another may fit, or not all are far."""
        self.others = [
            {other: away for other, away in self.tested.get(index, {}).items() if other != token}
            for index, token in enumerate(self.ids[:count].tolist())
        ]
        self.tests = [1 + len(some) for some in self.others]
        nearest = [min(some.items(), key=itemgetter(1), default=(-1, math.inf)) for some in self.others]
        self.rivals, self.rival_distances = [token for token, _ in nearest], [away for _, away in nearest]
        nearness = zip(self.target.fars, self.rival_distances, strict=False)
        near = [index for index, (far, away) in enumerate(nearness) if not far <= away < math.inf]
        return [
            index
            for index in near
            if not self.is_clear(index, lookalikes) or self.is_contested(index, lookalikes)
        ]

    def is_clear(self, index: int, lookalikes: Lookalikes) -> bool:
        """Whether what was tried at a position shows that no token lies near that was not tried."""
        return lookalikes.all_far(int(self.ids[index]), self.others[index], self.target.fars[index])

    def is_contested(self, index: int, lookalikes: Lookalikes) -> bool:
        """Whether another token may fit at a position, as far as they were tried."""
        twins = lookalikes.twins(int(self.ids[index]))
        return any(other not in twins for other, _ in self.possible(index))

    def nearest(self, at: int) -> int | None:
        """The nearest of the tokens tested at a position, if it fits."""
        token, away = min(self.tested.get(at, {}).items(), key=itemgetter(1), default=(-1, math.inf))
        return token if away <= self.target.radii[at] else None

    def near_miss(self, at: int) -> int | None:
        """The token that another shape of a pass may show to fit at a position, though none does in this one.

        The nearest by far, within what other kernels may do to a state; and only so often.
        """
        refused = sorted(self.tested.get(at, {}).items(), key=itemgetter(1))[:2]
        if not refused or refused[0][1] <= self.target.radii[at] or self.looks[at] >= _LOOKS:
            return None
        token, away = refused[0]
        alone = len(refused) < 2 or refused[1][1] >= _ALONE * away
        return token if alone and away <= ANOTHER_SHAPE * self.target.radii[at] else None

    def note_scan(self, index: int, distances: Float[Tensor, " vocabulary"]) -> None:
        """Keep what a scan of the whole vocabulary has shown at a position."""
        distances = distances.clone()
        distances[int(self.ids[index])] = math.inf
        nearest = distances.argsort()[: 1 + int((distances <= self.target.reaches[index]).sum())]
        self.others[index] = {int(token): float(distances[token]) for token in nearest}
        self.tests[index] = len(distances)
        self.rivals[index], self.rival_distances[index] = int(nearest[0]), float(distances[nearest[0]])

    def fits(self, count: int, lookalikes: Lookalikes) -> tuple[Fit, ...]:
        """The first positions, as they were verified."""
        return tuple(Fit(at, lookalikes.twins(at.token_id)) for at in self.positions(count))

    def other_fits(self, fit: Fit, lookalikes: Lookalikes) -> list[Fit]:
        """What else may fit at a verified position."""
        return [
            Fit(fit.position._replace(token_id=token, distance=away), lookalikes.twins(token))
            for token, away in self.possible(fit.position.index)
            if token not in fit.twins
        ]

    def possible(self, index: int) -> list[tuple[int, float]]:
        """Other tokens that may fit at a position, as far as they were tried."""
        reach = self.target.reaches[index]
        return [(token, away) for token, away in self.others[index].items() if away <= reach]


def replaced(ids: Int[Tensor, " position"], at: int, token: int) -> Int[Tensor, " position"]:
    """The same ids with another token at one position."""
    row = ids.clone()
    row[at] = token
    return row
