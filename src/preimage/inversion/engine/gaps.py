"""States of some positions alone: the tokens between them are found by what follows them.

A state depends on every token before it. So where positions are missing, tokens for them are tried together
with the token of the next state that was kept: what the model expects first, the whole vocabulary at last for
one missing token, and slot by slot, nearer and nearer, for several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.expectation import Expectation, likely_first, together
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.policies import growing
from preimage.inversion.engine.search import Fit, Outcome
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.result import Position
from preimage.models import LanguageModel

_UNVERIFIED = 0.9  # how sure a token may be whose state was not met
_BESIDE = 16  # likely tokens tried beside every one that fits: several may
_BATCH = 1024  # pairs tried before it is looked whether one fits
_READ = 8  # of what a proposer reads in the state behind a gap, so many tokens are tried there
_ALL = 2**31
# Expected and read tokens, for one that is missing; the last where there are few pairs in all.
_ONE = ((256, 2), (4096, 1), (1024, _READ), (_ALL, 1), (_ALL, _READ), (_ALL, _ALL))
FEW_PAIRS = 2**20
_SLOTS = ((512, 64), (4096, 512))  # the same tried at every slot of a longer gap, round after round

Row = tuple[int, ...]


class _Found(NamedTuple):
    """Tokens up to the next state that was kept, and how near they come to it."""

    tokens: Row
    away: float
    runner_up: tuple[int, float] | None
    tests: int


class Gaps:
    """The prompt of which the states at some positions are known, up to the last of these."""

    def __init__(
        self,
        model: LanguageModel,
        observed: Float[Tensor, "row d"],
        at: Sequence[int],
        verifier: Verifier,
        proposer: Proposer,
        budget: Budget,
    ) -> None:
        self._model, self._verifier, self._budget, self._at = model, verifier, budget, at
        self._target = verifier.target(observed)
        whole = torch.zeros(1, at[-1] + 1, observed.shape[1], dtype=observed.dtype, device=model.device)
        valid = torch.zeros(1, at[-1] + 1, dtype=torch.bool, device=model.device)
        whole[0, list(at)], valid[0, list(at)] = observed.to(model.device), True
        self._scores = proposer.score(whole, valid)
        self._prefix = model.prefix(verifier.tap)
        self._expectation = Expectation(model)
        self._lookalikes = lookalikes_of(model)
        self._ids: list[int] = []

    @torch.inference_mode()
    def run(self) -> Outcome:
        """Read from the left, from one known state to the next."""
        fits: list[Fit] = []
        for row, place in enumerate(self._at):
            target = self._target[row]
            try:
                found = self._next(place, target)
                others = self._others(found, target)
            except BudgetSpentError as spent:
                stopped = f"Stopped before position {place}: {spent}."
                return Outcome((), tuple(fits), None, stopped, read=self._guessed(fits))
            radius = self._target.radii[row]
            if not found.away <= self._target.reaches[row]:
                return self._nothing(fits, place, found, radius)
            self._prefix.extend(torch.tensor(found.tokens))
            first = len(self._ids)
            self._ids += found.tokens
            for index, (one, twins) in enumerate(zip(found.tokens, others, strict=True), first):
                rival, far = (found.runner_up if index == place else None) or (None, None)
                position = Position(index, one, found.away, radius, True, rival, far, found.tests)
                fits.append(Fit(position, twins))
        states = self._model.states(torch.tensor([self._ids]), (self._verifier.tap,))[self._verifier.tap][0]
        away_from = self._target.away(self._verifier.observe(states[list(self._at)])).tolist()
        wrong = [i for i, away in enumerate(away_from) if not away <= self._target.radii[i]]
        if wrong:
            found = _Found((self._ids[self._at[wrong[0]]],), away_from[wrong[0]], None, 1)
            return self._nothing(fits, self._at[wrong[0]], found, self._target.radii[wrong[0]])
        return Outcome((tuple(fits),), tuple(fits), None, "")

    def _nothing(self, fits: list[Fit], place: int, found: _Found, radius: float) -> Outcome:
        missing = place - len(self._ids)
        before = f" and the {missing} before it whose states are missing" if missing > 0 else ""
        reason = (
            f"No tokens were found for position {place}{before}: the nearest come to {found.away:.4g}, and "
            f"{radius:.4g} is allowed."
        )
        failure = Position(place, found.tokens[-1], found.away, radius, False, None, None, found.tests)
        return Outcome((), tuple(fits), failure, reason, read=self._guessed(fits))

    def _guessed(self, fits: list[Fit]) -> tuple[tuple[int, float], ...]:
        """What was met, and behind it what the other states read as and what the model expects between."""
        known = set(self._at)
        read = [
            (fit.position.token_id, (1.0 if index in known else _UNVERIFIED) / (1 + len(fit.twins)))
            for index, fit in enumerate(fits)
        ]
        for place in range(len(read), self._at[-1] + 1):
            if place in known:
                token, sure = self._scores.first_choice(0, place)
            else:
                token, sure = int(self._expected_behind([one for one, _ in read])[0]), 0.0
            read.append((token, min(sure, _UNVERIFIED)))
        return tuple(read)

    def _next(self, place: int, target: Target) -> _Found:
        """The tokens up to a position whose state is known."""
        read = self._scores.order(0, place).cpu()
        missing = place - len(self._ids)
        trial = _Trial(self, target)
        if missing == 0:
            trial.all(self._one_by_one(read))
        elif missing == 1:
            expected = self._expected(())
            few = self._model.vocab_size**2 <= FEW_PAIRS
            for count, beside in _ONE if few else _ONE[:-1]:
                if trial.all(_pairs(expected[:count], read[:beside])):
                    break
        else:
            self._fill(missing, read, trial)
        return trial.found()

    def _others(self, found: _Found, target: Target) -> list[Row]:
        """Other tokens that fit as well at every slot: likely ones and lookalikes are tried there.

        What stands at a missing position may leave no trace in what follows.
        """
        if not found.away <= float(target.reach):
            return [() for _ in found.tokens]
        fitting = []
        for slot, token in enumerate(found.tokens):
            likely = self._expected(found.tokens[:slot])[:_BESIDE].tolist()
            alike = (*self._lookalikes.twins(token), *self._lookalikes.near(token))
            tokens = [one for one in dict.fromkeys((*likely, *alike)) if one != token]
            rows = [(*found.tokens[:slot], one, *found.tokens[slot + 1 :]) for one in tokens]
            away = self.away(rows, target).tolist() if rows else []
            near = zip(tokens, away, strict=True)
            fitting.append(tuple(one for one, distance in near if distance <= float(target.reach)))
        return fitting

    def _one_by_one(self, read: Int[Tensor, " vocabulary"]) -> Iterator[list[Row]]:
        """Tokens where none is missing, a few at first."""
        expected = self._expectation.behind(self._ids)
        order = read if expected is None else together(-torch.argsort(read).float(), expected.cpu())
        for tokens in growing(order, self._prefix.max_candidates):
            yield [(token,) for token in tokens.tolist()]

    def _fill(self, missing: int, read: Int[Tensor, " vocabulary"], trial: _Trial) -> None:
        """Several missing tokens: from the likeliest on, slot by slot, as long as that comes nearer."""
        row: Row = ()
        for _ in range(missing):
            row = (*row, int(self._expected(row)[0]))
        row = (*row, int(read[0]))
        if trial.all([[row]]):
            return
        for count, beside in _SLOTS:
            nearest = None
            while nearest != trial.nearest:
                nearest = trial.nearest
                for slot in range(missing + 1):
                    best = trial.nearest
                    order = read[:beside] if slot == missing else self._expected(best[:slot])[:count]
                    if trial.all([[(*best[:slot], one, *best[slot + 1 :]) for one in order.tolist()]]):
                        return

    def _expected(self, behind: Row) -> Int[Tensor, " vocabulary"]:
        """Every token, by what the model expects behind those read and some more."""
        return self._expected_behind([*self._ids, *behind])

    def _expected_behind(self, ids: list[int]) -> Int[Tensor, " vocabulary"]:
        expected = self._expectation.behind(ids)
        return likely_first(self._model) if expected is None else expected.argsort(descending=True).cpu()

    def away(self, rows: list[Row], target: Target) -> Float[Tensor, " row"]:
        """How far the last states of rows of tokens behind those read are from one that is known."""
        width = len(rows[0])
        parts = []
        for part in torch.tensor(rows).split(max(1, self._prefix.max_candidates // width)):
            self._budget.check(len(part))
            self._budget.tests += len(part)
            parts.append(target.away(self._verifier.observe(self._prefix.try_rows(part)[:, -1])).cpu())
        return torch.cat(parts)


class _Trial:
    """Rows of tokens tried against one state: the nearest, and the nearest that ends in another token."""

    def __init__(self, gaps: Gaps, target: Target) -> None:
        self._gaps, self._target, self._reach = gaps, target, float(target.reach)
        self._tried: dict[Row, float] = {}

    def all(self, batches: Iterator[list[Row]] | list[list[Row]]) -> bool:
        """Try batches of rows until one has a row that may fit; whether one has."""
        for batch in batches:
            fresh = [row for row in dict.fromkeys(batch) if row not in self._tried]
            if fresh:
                away = self._gaps.away(fresh, self._target).tolist()
                self._tried.update(zip(fresh, away, strict=True))
                if min(away) <= self._reach:
                    return True
        return False

    @property
    def nearest(self) -> Row:
        """The row that comes nearest."""
        return min(self._tried, key=self._tried.__getitem__)

    def found(self) -> _Found:
        """What came nearest of all."""
        row = self.nearest
        others = {other[-1]: away for other, away in self._tried.items() if other[-1] != row[-1]}
        rival = min(others, key=others.__getitem__, default=None)
        runner_up = None if rival is None else (rival, others[rival])
        return _Found(row, self._tried[row], runner_up, len(self._tried))


def _pairs(first: Int[Tensor, " one"], second: Int[Tensor, " other"]) -> Iterator[list[Row]]:
    """Every pair, in batches."""
    pairs: Iterator[Row] = product(first.tolist(), second.tolist())
    while batch := list(islice(pairs, _BATCH)):
        yield batch
