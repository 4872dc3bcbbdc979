"""Inversion where one vector was kept of a whole prompt: its last state, or the mean over its positions.

One vector does not say how long its prompt was, and prompts of many tokens cannot be enumerated. Whether one
token made it is decided, by trying every token; and then, in a model with relative positions and no BOS,
every constant prompt of that token made it as well, because identical value rows average to themselves.
Longer prompts are searched for (``one_vector.py``). One that is found fits beyond doubt; that no other does
is tested, on all prompts that were tried, and never proved.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.one_vector import (
    ENUMERATED,
    MAX_LENGTH,
    Prompt,
    Tried,
    VectorSearch,
    neighbours,
    readers_of,
)
from preimage.inversion.engine.search import MAX_PROMPTS, Fit, Outcome, nearest_and_fits
from preimage.inversion.engine.verifier import Verifier, distances_of
from preimage.inversion.result import Position
from preimage.models import LanguageModel
from preimage.progress import Progress, silent

LONGEST = 64  # constant prompts of up to so many tokens are tried
SECONDS = 60.0  # of the search for longer prompts, where no limit is given
_LISTED = 8  # constant prompts of up to so many tokens are listed
# Prompts of that search where no limit is given: so many vocabularies; of a small one, so many of its pairs.
_TESTS, _PAIRS, _TESTS_AT_LEAST, _ENOUGH = 16, 8, 2048, 2**16
_KEPT = {"last": "Only the last position was kept", "mean": "Only the mean over positions was kept"}


def one_vector_budget(max_tests: int | None, timeout: float | None) -> Budget:
    """What one vector may cost, if anything was said of it."""
    return Budget(sys.maxsize if max_tests is None else max_tests, timeout)


def search_seconds(max_tests: int | None, timeout: float | None) -> float | None:
    """How long longer prompts are searched for: a default where nothing was said, else as budgeted."""
    return SECONDS if max_tests is None and timeout is None else None


def prepare_last(model: LanguageModel, verifier: Verifier, positions: str = "last") -> None:
    """Fit the readers, or read them from the cache, before any prompt's time is counted."""
    readers_of(model, verifier, mean=positions == "mean")


def invert_last(
    model: LanguageModel,
    observed: Float[Tensor, "1 d"],
    verifier: Verifier,
    budget: Budget,
    *,
    positions: str = "last",
    seconds: float | None = SECONDS,
    max_length: int = MAX_LENGTH,
    progress: Progress = silent,
) -> Outcome:
    """The prompt whose last state (``positions="mean"``: whose mean over positions) is the observed vector.

    Every token is tried as a prompt of its own, and prompts of up to ``max_length`` tokens are searched for:
    for at most ``seconds`` (None: no limit but the budget's), which count for the search alone. A prompt is
    the answer only where all others that were tried are far: then no other comes that near but by a structure
    of the model, and prompts alike in structure are tried.
    """
    return _Inverting(model, observed, verifier, budget, positions, progress).run(seconds, max_length)


class _Scan(NamedTuple):
    """Every token tried as a prompt of its own: the distances, and why not all were."""

    tested: Float[Tensor, " vocabulary"]
    stopped: str


class _Inverting:
    """One vector on its way to an outcome."""

    def __init__(
        self,
        model: LanguageModel,
        observed: Float[Tensor, "1 d"],
        verifier: Verifier,
        budget: Budget,
        positions: str,
        progress: Progress,
    ) -> None:
        self._model, self._verifier, self._budget = model, verifier, budget
        self._vector, self._mean = observed[0], positions == "mean"
        self._kept = _KEPT[positions]
        self._target = verifier.target(observed)
        self._reach, self._radius = self._target.reaches[0], self._target.radii[0]
        self._lookalikes = lookalikes_of(model)
        self._tried = Tried(model, verifier, self._target, (budget,), mean=self._mean, progress=progress)

    def run(self, seconds: float | None, max_length: int) -> Outcome:
        """One token first where that is likely or quick, else what takes more; both, where neither fits."""
        search = VectorSearch(
            self._model,
            readers_of(self._model, self._verifier, mean=self._mean),
            self._vector,
            self._tried,
            mean=self._mean,
            max_length=max_length,
        )
        scan = None
        if search.may_be_one or self._model.vocab_size <= ENUMERATED:
            scan = self._scan()
        if scan is None or not self._fits(scan):
            self._search(search, seconds)
        found = self._found()
        if any(len(prompt) > 1 for prompt in found) and not any(len(set(prompt)) == 1 for prompt in found):
            return self._longer(found)
        scan = scan or self._scan()
        if self._fits(scan):
            return self._one_token(scan)
        return self._longer(found) if found else self._nothing(scan)

    def _scan(self) -> _Scan:
        """Try every token as a prompt of its own, as far as the budget goes."""
        vocabulary, reason = self._model.vocab_size, "the budget is spent"
        prefix = self._model.prefix(self._verifier.tap)
        tested = distances_of({}, vocabulary)
        try:
            for part in torch.arange(vocabulary).split(prefix.max_candidates):
                self._verifier.test(prefix, part, self._target[0], tested, self._budget)
        except BudgetSpentError as spent:
            reason = str(spent)
        done = torch.isfinite(tested).nonzero().flatten().tolist()
        for token in done:
            self._tried.note(float(tested[token]), (token,))
        stopped = f"Stopped after {len(done)} of {vocabulary} tokens: {reason}."
        return _Scan(tested, stopped if len(done) < vocabulary else "")

    def _fits(self, scan: _Scan) -> bool:
        return float(scan.tested.min()) <= self._reach

    def _search(self, search: VectorSearch, seconds: float | None) -> None:
        """Search for longer prompts, as far as every budget goes."""
        vocabulary = self._model.vocab_size
        most = max(_TESTS * vocabulary, min(_PAIRS * vocabulary**2, _ENOUGH), _TESTS_AT_LEAST)
        own = Budget(sys.maxsize, None) if seconds is None else Budget(most, seconds)
        before = self._tried.budgets
        self._tried.budgets = (*before, own)
        with suppress(BudgetSpentError):
            search.run()
        self._tried.budgets = before

    def _found(self) -> dict[Prompt, float]:
        """Prompts that fit, each checked alone, one of those that differ by twins only; the nearest first."""
        names: set[Prompt] = set()
        found: dict[Prompt, float] = {}
        for prompt in sorted(self._tried.fits, key=lambda one: (self._tried.fits[one], one)):
            name = tuple(min(token, *self._lookalikes.twins(token), token) for token in prompt)
            if name not in names and len(found) < MAX_PROMPTS:
                names.add(name)
                away = self._tried.alone(prompt)
                if away <= self._radius:
                    found[prompt] = away
        return found

    def _one_token(self, scan: _Scan) -> Outcome:
        """Every single-token and constant prompt that fits."""
        nearest, fits = nearest_and_fits(0, scan.tested, self._target, self._lookalikes)
        hypotheses: list[Sequence[Fit]] = []
        for position, twins in fits:
            if len(hypotheses) >= MAX_PROMPTS:
                break
            for length in self._constant_lengths(position):
                hypotheses.append(tuple(Fit(position._replace(index=i), twins) for i in range(length)))
        alone = len(hypotheses) == 1 and self._others_are_far and not scan.stopped
        reason = "" if alone else (
            f"{scan.stopped} {self._kept}: prompts of one token and constant prompts of up to {LONGEST} "
            "tokens were tried. Of other longer prompts nothing is known."
        ).strip()  # fmt: skip
        partial = hypotheses[0] if hypotheses else ()
        words = self._words(f", and this token repeated, up to {LONGEST} times")
        return Outcome(tuple(hypotheses), partial, nearest, reason, undecided=not alone, tried=words)

    def _constant_lengths(self, position: Position) -> list[int]:
        """Lengths of prompts of one token, repeated, that fit; of those longer than listed, the shortest."""
        longest = min(LONGEST, self._model.max_length or LONGEST)
        fits = [1] if self._tried.alone((position.token_id,)) <= position.radius else []
        distances = self._tried.repeated(position.token_id, longest)
        fits += [k for k in range(2, longest + 1) if distances[k - 1] <= position.radius]
        return [k for k in fits if k <= _LISTED or len([n for n in fits if 1 < n < k]) == 0]

    def _longer(self, found: dict[Prompt, float]) -> Outcome:
        """Prompts of several tokens that fit, and whether one stands alone: what is like it is tried."""
        beside: dict[Prompt, list[Position]] = {}
        stopped = ""
        try:
            while (fresh := [prompt for prompt in found if prompt not in beside]) and len(
                found
            ) < MAX_PROMPTS:
                beside[fresh[0]] = self._try_beside(fresh[0], found[fresh[0]])
                found = self._found()
        except BudgetSpentError as spent:
            stopped = f"Stopped before all that is like it was tried: {spent}. "
        hypotheses = [
            tuple(Fit(position, self._lookalikes.twins(position.token_id)) for position in positions)
            for prompt, away in found.items()
            for positions in [beside.get(prompt) or self._positions(prompt, away, {})]
        ]
        alone = len(hypotheses) == 1 and self._others_are_far and not stopped
        reason = "" if alone else f"{self._kept}. {stopped}{self._words()}"
        return Outcome(
            tuple(hypotheses), hypotheses[0], None, reason, undecided=not alone, tried=self._words()
        )

    def _try_beside(self, prompt: Prompt, away: float) -> list[Position]:
        """Try prompts alike in structure, and at every slot the tokens most like the one there."""
        for length in (len(prompt) - 1, len(prompt), len(prompt) + 1):
            self._tried.test(other for other in neighbours(prompt) if len(other) == length)
        every = torch.ones(self._model.vocab_size, dtype=torch.bool)
        tested: dict[int, dict[int, float]] = {}
        for slot, token in enumerate(prompt):
            rivals = self._lookalikes.rivals(token, every).tolist()
            others = [(*prompt[:slot], other, *prompt[slot + 1 :]) for other in rivals if other != token]
            tested[slot] = {other[slot]: far for far, other in self._tried.test(others, again=True)}
        return self._positions(prompt, away, tested)

    def _positions(
        self, prompt: Prompt, away: float, tested: Mapping[int, Mapping[int, float]]
    ) -> list[Position]:
        """A prompt as it is told; a slot's runner-up is the nearest token, all other slots as they are."""
        positions = []
        for slot, token in enumerate(prompt):
            others = tested.get(slot) or {}
            rival = min(others, key=others.__getitem__, default=None)
            distance = None if rival is None else others[rival]
            position = Position(slot, token, away, self._radius, True, rival, distance, 1 + len(others))
            positions.append(position)
        return positions

    def _nothing(self, scan: _Scan) -> Outcome:
        """Nothing that was tried fits."""
        distance, nearest = self._tried.outside
        ids = " ".join(map(str, nearest))
        reason = (
            f"{scan.stopped} {self._kept}, and no prompt that was tried fits: the nearest, {ids}, is "
            f"{distance:.4g} away and {self._radius:.4g} is allowed. {self._words(near=False)} Longer "
            "prompts need the states of every position."
        ).strip()
        last = nearest[-1] if nearest else 0
        failure = Position(
            0, last, distance, self._radius, False, None, None, sum(self._tried.counts.values())
        )
        return Outcome((), (), failure, reason, undecided=True, read=self._tried.read())

    @property
    def _others_are_far(self) -> bool:
        return self._tried.outside[0] >= self._target.fars[0]

    def _words(self, more: str = "", *, near: bool = True) -> str:
        """Which prompts were tried, and how near others came than those that fit."""
        counts, vocabulary = self._tried.counts, self._model.vocab_size
        parts = [f"{'all ' * (counts[1] == vocabulary)}{counts[1]} prompts of one token"] if counts[1] else []
        longer = sorted(n for n in counts if n > 1 and counts[n])
        if longer:
            lengths = f"{longer[0]} to {longer[-1]}" if len(longer) > 1 else f"{longer[0]}"
            parts.append(f"{sum(counts[n] for n in longer)} of {lengths} tokens")
        distance = self._tried.outside[0]
        words = f"Tried were {' and '.join(parts)}{more}."
        if near and math.isfinite(distance) and self._radius:
            words += (
                f" None that does not fit is nearer than {distance / self._radius:.3g} times what is allowed."
            )
        return words
