"""Rows of one prompt in an unknown order: which tokens made them, and in which order.

Behind the prefix found so far, the likeliest tokens of every row that is left are tried in one batch and each
is compared with all of these rows: a match fixes the token and the row at once. Where nothing matches, more
tokens are tried, up to the whole vocabulary. An order that is complete is handed to the ordinary engine,
which has the last word on the reordered states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.search import MAX_PROMPTS, Fit, Outcome
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.result import Position
from preimage.models import LanguageModel

_DEPTHS = (2, 8, 64, 512)  # tokens of every row, round after round, before the whole vocabulary
_COMPARED = 2**24  # numbers compared at once
_MORE, _MORE_AT_LEAST = 4, 4096  # vocabularies, tests, spent on other orders than the first


class _Match(NamedTuple):
    """A token at the next position, and the row that its state may be."""

    token: int
    row: int
    distance: float


def invert_shuffled(
    model: LanguageModel,
    observed: Float[Tensor, "row d"],
    verifier: Verifier,
    proposer: Proposer,
    budget: Budget,
) -> tuple[Outcome, tuple[int, ...]]:
    """What one prompt's rows in an unknown order came from, and the row of every position.

    The outcome is that of the rows in this order. Where several orders fit, it lists the prompts of all of
    them and the order is the first one's; where none does, order and outcome end at the dead end that got
    furthest.
    """
    with torch.inference_mode():
        return _Reordering(model, observed, verifier, proposer, budget).run()


class _Reordering:
    def __init__(
        self,
        model: LanguageModel,
        observed: Float[Tensor, "row d"],
        verifier: Verifier,
        proposer: Proposer,
        budget: Budget,
    ) -> None:
        self._model, self._observed, self._verifier = model, observed, verifier
        self._proposer, self._budget = proposer, budget
        self._target = verifier.target(observed)
        self._prefix = model.prefix(verifier.layer)
        self._lookalikes = lookalikes_of(model)
        self._likely = _likeliest(proposer, observed.to(model.device), min(_DEPTHS[-1], model.vocab_size))
        self._path: list[_Match] = []
        self._others: list[list[_Match]] = []  # what else matched at every position of the path
        self._found: dict[tuple[int, ...], Outcome] = {}  # by order
        self._tests_before = 0  # spent when the first order was complete
        self._dead_end: tuple[Outcome, tuple[int, ...]] | None = None

    def run(self) -> tuple[Outcome, tuple[int, ...]]:
        """Follow the nearest match, then every other one, as far as the budget goes."""
        stopped = ""
        try:
            while True:
                if len(self._path) == len(self._observed):
                    self._conclude()
                elif self._step():
                    continue
                if len(self._found) >= MAX_PROMPTS:
                    stopped = f"Stopped after {len(self._found)} orders that are complete; more may be."
                    break
                if not self._back_up():
                    break
        except BudgetSpentError as spent:
            stopped = f"Stopped at position {len(self._path)}: {spent}."
            if not self._found:
                outcome = Outcome((), self._fits(), None, stopped, undecided=True, read=self._read())
                return outcome, self._order()
        return self._outcome(stopped)

    def _outcome(self, stopped: str) -> tuple[Outcome, tuple[int, ...]]:
        """All orders in one outcome."""
        fitting = {order: outcome for order, outcome in self._found.items() if outcome.hypotheses}
        if not fitting:
            misfits = [(outcome, order) for order, outcome in self._found.items()]
            return (misfits or [self._dead_end or (Outcome((), (), None, stopped), ())])[0]
        prompts: dict[tuple[int, ...], Sequence[Fit]] = {}
        for outcome in fitting.values():
            for fits in outcome.hypotheses:
                prompts.setdefault(tuple(fit.name for fit in fits), fits)
        undecided = bool(stopped) or any(outcome.undecided for outcome in fitting.values())
        reason = stopped or next((one.reason for one in fitting.values() if one.undecided), "")
        order, first = next(iter(fitting.items()))
        hypotheses = tuple(prompts.values())[:MAX_PROMPTS]
        return Outcome(hypotheses, hypotheses[0], first.failure, reason, undecided), order

    def _conclude(self) -> None:
        """Let the ordinary engine judge the rows in this order."""
        order = self._order()
        if order not in self._found:
            engine = FastInverter(self._model, self._verifier, self._proposer, together=False)
            budget = self._budget
            outcome = engine.run([self._observed[list(order)]], [budget])[0]
            self._found[order] = outcome if outcome.hypotheses else replace(outcome, read=self._read())

    def _step(self) -> bool:
        """Step onto the nearest match at the next position; False at a dead end."""
        matches, nearest = self._matches()
        if not matches:
            self._fail(nearest)
            return False
        self._take(matches[0], matches[1:])
        return True

    def _take(self, match: _Match, others: list[_Match]) -> None:
        self._prefix.extend(torch.tensor([match.token]))
        self._path.append(match)
        self._others.append(others)

    def _back_up(self) -> bool:
        """Go back to the latest position where something else matched."""
        while self._path:
            self._path.pop()
            others = self._others.pop()
            if others:
                self._prefix.crop(len(self._path))
                self._take(others[0], others[1:])
                return True
        return False

    def _matches(self) -> tuple[list[_Match], _Match]:
        """What matches at the next position, nearest first, and the nearest pair of all."""
        left = self._left()
        reach, far = self._target.reach[left], torch.tensor(self._target.fars)[left]
        tried = torch.zeros(self._model.vocab_size, dtype=torch.bool)
        ids: list[Tensor] = []
        away: list[Tensor] = []
        for depth in (*_DEPTHS, self._model.vocab_size):
            more = self._candidates(left, depth, tried)
            tried[more] = True
            if len(more):
                ids.append(more)
                away.append(self._away(more, left))
            if not away:
                continue
            seen = torch.cat(away)
            if bool((seen <= reach).any()) and bool(((seen <= reach) | (seen >= far)).all()):
                break  # all else that was tried is far: nothing else can match but what was tried
        tokens, distances = torch.cat(ids), torch.cat(away)
        best = divmod(int((distances / reach).argmin()), len(left))
        nearest = _Match(int(tokens[best[0]]), left[best[1]], float(distances[best]))
        pairs = (distances <= reach).nonzero().tolist()
        matches = [_Match(int(tokens[i]), left[j], float(distances[i, j])) for i, j in pairs]
        return self._without_twins(sorted(matches, key=lambda match: match.distance)), nearest

    def _candidates(self, left: list[int], depth: int, tried: Tensor) -> Int[Tensor, " candidate"]:
        """The likeliest tokens of the rows that are left, those that were tried left out."""
        if depth > self._likely.shape[1]:
            return (~tried).nonzero().flatten()
        likely = self._likely[left, :depth].unique()
        fresh: Tensor = likely[~tried[likely]]
        return fresh

    def _away(self, ids: Int[Tensor, " candidate"], left: list[int]) -> Float[Tensor, "candidate left"]:
        """How far the state of every candidate is from every row that is left."""
        rows = self._target[left]
        size = max(1, _COMPARED // rows.low.numel())
        parts = []
        for part in ids.split(min(size, self._prefix.max_candidates)):
            self._check_budget(len(part))
            states = self._verifier.observe(self._prefix.try_tokens(part))
            parts.append(rows.away(states[:, None]).cpu())
            self._budget.tests += len(part)
        return torch.cat(parts)

    def _check_budget(self, tests: int) -> None:
        self._budget.check(tests)
        more = max(_MORE * self._model.vocab_size, _MORE_AT_LEAST)
        if self._found and self._budget.tests - self._tests_before > more:
            raise BudgetSpentError(f"after {more} more tests it is open whether other orders fit")
        if not self._found:
            self._tests_before = self._budget.tests + tests

    def _without_twins(self, matches: list[_Match]) -> list[_Match]:
        """One match a row for tokens of the same embedding, and one for rows that are the same to the bit."""
        kept: list[_Match] = []
        for match in matches:
            row, twins = self._observed[match.row], self._lookalikes.twins(match.token)
            same = (
                one for one in kept
                if (one.token == match.token or one.token in twins)
                and (one.row == match.row or torch.equal(self._observed[one.row], row))
            )  # fmt: skip
            if next(same, None) is None:
                kept.append(match)
        return kept

    def _left(self) -> list[int]:
        taken = {match.row for match in self._path}
        return [row for row in range(len(self._observed)) if row not in taken]

    def _order(self) -> tuple[int, ...]:
        return tuple(match.row for match in self._path)

    def _fits(self) -> tuple[Fit, ...]:
        return tuple(
            Fit(self._position(index, match, accepted=True), self._lookalikes.twins(match.token))
            for index, match in enumerate(self._path)
        )

    def _position(self, index: int, match: _Match, accepted: bool) -> Position:
        radius = self._target.radii[match.row]
        return Position(index, match.token, match.distance, radius, accepted, None, None, 1)

    def _fail(self, nearest: _Match) -> None:
        """Remember the dead end that got furthest."""
        at = len(self._path)
        if self._dead_end is None or at > len(self._dead_end[1]):
            position = self._position(at, nearest, accepted=False)
            reason = (
                f"No token of the vocabulary makes any of the rows left at position {at}: the nearest, "
                f"{nearest.token}, is {nearest.distance:.4g} from row {nearest.row} and "
                f"{position.radius:.4g} is allowed."
            )
            outcome = Outcome((), self._fits(), position, reason, read=self._read())
            self._dead_end = outcome, self._order()

    def _read(self) -> tuple[tuple[int, float], ...]:
        """The tokens in their order so far; behind them what the other rows read as, in any order."""
        left = self._left()
        others = [(int(self._likely[row, 0]), 1 / (1 + len(left))) for row in left]
        return (*((match.token, 1.0) for match in self._path), *others)


def _likeliest(proposer: Proposer, observed: Float[Tensor, "row d"], count: int) -> Int[Tensor, "row count"]:
    """The likeliest tokens of every row on its own, most likely first.

    Each is the middle of a prompt of three: a first position would be taken for an attention sink, and the
    neighbours are not known.
    """
    alone = observed.new_zeros(len(observed), 3, observed.shape[1])
    alone[:, 1] = observed
    valid = torch.zeros(alone.shape[:2], dtype=torch.bool, device=observed.device)
    valid[:, 1] = True
    scores = proposer.score(alone, valid)
    middle = torch.arange(len(observed), device=observed.device) * 3 + 1
    return torch.cat([scores.at(some).topk(count).indices.cpu() for some in middle.split(64)])
