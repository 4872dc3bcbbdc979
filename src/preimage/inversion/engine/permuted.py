"""Coordinates in an unknown order, the same at every position: find the order.

Sorted coordinates do not depend on the order. The sorted state of a first position is compared with the
sorted state of every token until one is the same; then equal numbers name each other's places. Numbers that
are alike leave a choice, which other positions settle: their tokens are read in the same way, proposed from
states put into the order that fits so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]  # no types
from torch import Tensor

from preimage.errors import StatesError
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.expectation import likely_first
from preimage.inversion.engine.policies import growing
from preimage.inversion.engine.verifier import CandidatePrefix, Target, Verifier
from preimage.inversion.proposers.standard import Proposer
from preimage.models import LanguageModel

_POSITIONS = 48  # read at most to settle what is alike


def find_permutation(
    model: LanguageModel,
    states: Sequence[Float[Tensor, "_ d"]],
    verifier: Verifier,
    proposer: Proposer,
    budget: Budget,
) -> tuple[int, ...]:
    """The order of the coordinates: ``kept`` of an observation, row[j] being h[kept[j]] of a plain state h.

    ``states``: one prompt's rows each, whose coordinates all have the same order. Cost: at worst a test of
    the whole vocabulary at the first position; special tokens and likely first ones are tried first.
    Coordinates that are alike at every position read are put in any order: they cannot be told apart.
    """
    with torch.inference_mode():
        reading = _Reading(model, states, verifier, proposer, budget)
        for token in reading.first_tokens():
            matching = reading.read_on(token)
            order = None if matching is None else matching.best()
            if order is not None:
                return tuple(order.argsort().tolist())
    raise StatesError(
        "No token's state has the numbers of the first position in any order.",
        "Check the model, the layer and what was seen, or leave permuted out.",
    )


class _Matching:
    """Which plain coordinate may be which observed one, by all positions read so far."""

    def __init__(self, width: int) -> None:
        self.fits: Bool[Tensor, "plain seen"] = torch.ones(width, width, dtype=torch.bool)
        self._apart: Float[Tensor, "plain seen"] = torch.zeros(width, width, dtype=torch.float64)

    def add(self, plain: Float[Tensor, " d"], target: Target, radius: float) -> None:
        """Take in one position: its plain state, and what was seen there."""
        exact, low, high = plain.to(torch.float64).cpu()[:, None], target.low.cpu(), target.high.cpu()
        apart = (exact - high).clamp_min(0) + (low - exact).clamp_min(0)
        if target.weights is not None:
            apart = apart * target.weights.cpu()
        self.fits &= apart <= radius
        self._apart += (apart / max(radius, 1e-300)).clamp_max(1e6)

    @property
    def unique(self) -> bool:
        """Whether every coordinate has one place."""
        return bool((self.fits.sum(dim=0) == 1).all() and (self.fits.sum(dim=1) == 1).all())

    def best(self, strict: bool = True) -> Int[Tensor, " plain"] | None:
        """The place of every plain coordinate among the observed ones; None where there is none for some."""
        if self.unique:
            return self.fits.to(torch.uint8).argmax(dim=1)
        costs = torch.where(self.fits, self._apart, self._apart + 1e9)
        _, places = linear_sum_assignment(costs.numpy())
        order = torch.from_numpy(places)
        held = bool(self.fits[torch.arange(len(order)), order].all())
        return order if held or not strict else None


class _Reading:
    def __init__(
        self,
        model: LanguageModel,
        states: Sequence[Float[Tensor, "_ d"]],
        verifier: Verifier,
        proposer: Proposer,
        budget: Budget,
    ) -> None:
        self._model, self._verifier, self._proposer, self._budget = model, verifier, proposer, budget
        self._states = [rows.to(model.device) for rows in states]
        self._targets = [verifier.target(rows[:_POSITIONS]) for rows in states]
        self._sorted = [
            _sorted(target, rows[:_POSITIONS])
            for target, rows in zip(self._targets, self._states, strict=True)
        ]

    def first_tokens(self) -> Iterator[int]:
        """Tokens whose sorted state is that of the very first position."""
        prefix = self._model.prefix(self._verifier.layer)
        yield from self._fitting(prefix, likely_first(self._model), self._sorted[0][0])

    def read_on(self, first: int) -> _Matching | None:
        """Read positions until every coordinate has one place; None where no token makes one of them."""
        matching = _Matching(self._states[0].shape[1])
        read = 0
        for number, (rows, target, ordered) in enumerate(
            zip(self._states, self._targets, self._sorted, strict=True)
        ):
            prefix = self._model.prefix(self._verifier.layer)
            for at in range(len(target)):
                tokens = iter([first])
                if number or at:
                    tokens = self._fitting(prefix, self._order(matching, rows, at), ordered[at])
                token = next(tokens, None)
                if token is None:
                    return None
                plain = self._verifier.observe(prefix.extend(torch.tensor([token])))[0]
                matching.add(plain, target[at], target.reaches[at])
                read += 1
                if not bool(matching.fits.any(dim=1).all()):
                    return None
                if matching.unique or read == _POSITIONS:
                    return matching
        return matching

    def _order(self, matching: _Matching, rows: Float[Tensor, "position d"], at: int) -> Tensor:
        """All tokens at a position, most likely first, by the states in the order that fits best so far."""
        order = matching.best(strict=False)
        assert order is not None
        plain = rows[:, order.to(rows.device)][None]
        valid = torch.ones(plain.shape[:2], dtype=torch.bool, device=plain.device)
        return self._proposer.score(plain, valid).order(0, at).cpu()

    def _fitting(
        self, prefix: CandidatePrefix, order: Int[Tensor, " vocabulary"], target: Target
    ) -> Iterator[int]:
        """Tokens whose sorted state is the one seen, as they are found; of a batch, the nearest first."""
        reach = float(target.reach)
        for ids in growing(order, prefix.max_candidates):
            self._budget.check(len(ids))
            states = self._verifier.observe(prefix.try_tokens(ids))
            away = target.away(states.sort(dim=-1).values).cpu()
            self._budget.tests += len(ids)
            for index in away.argsort().tolist():
                if not away[index] <= reach:
                    break
                yield int(ids[index])


def _sorted(target: Target, rows: Float[Tensor, "position d"]) -> Target:
    """The same with the coordinates of every position in ascending order.

    Sorting keeps an order between numbers: sorted states lie between the sorted ends of their cells.
    """
    order = rows.argsort(dim=-1)
    low = target.low.sort(dim=-1).values
    high = low if target.high is target.low else target.high.sort(dim=-1).values
    weights = None if target.weights is None else target.weights.gather(-1, order)
    return Target(low, high, weights, target.radius, target.reach)
