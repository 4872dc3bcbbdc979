"""Coordinates turned by an unknown rotation, the same at every position: find the rotation.

A rotation keeps lengths and angles: turned states have the lengths and the products with one another that
plain ones have. So tokens are read from the left, the first by the length of its state, every other one by
the length and by the products with all states read so far. Every state read shows one more direction before
and after the turn; what is seen of the next state along the directions known so far goes to the proposer, and
the rest is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.errors import StatesError
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.expectation import Expectation, likely_first, together
from preimage.inversion.engine.policies import growing
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.proposers.statistics import statistics_of
from preimage.models import LanguageModel, Prefix
from preimage.states import safety

_ALL = 2**31
# First tokens tried, second ones behind the nearest of them and behind the others, round after round.
_ROUNDS = ((512, 512, 512), (_ALL, _ALL, 2048), (_ALL, _ALL, _ALL))
_FEWEST = 4  # states of one prompt, without which lengths and angles may agree by chance
_CERTAIN = 16  # directions by which no other token fits
_BLURRED = 1e4  # noise over that of one state beyond which a direction is not used


def find_rotation(
    model: LanguageModel,
    states: Sequence[Float[Tensor, "_ d"]],
    verifier: Verifier,
    proposer: Proposer,
    budget: Budget,
) -> Float[Tensor, "d d"]:
    """A matrix R: rows are h R of plain states h, as far as the rows reach.

    ``states``: one prompt's rows each, all turned alike. Cost: at worst a test of the whole vocabulary at
    every position; what the model expects is tried first, and the more is read the better it is proposed.
    """
    if len(states[0]) < _FEWEST:
        raise StatesError(
            f"{len(states[0])} states of the first prompt are too few to tell how they were turned.",
            f"Begin with a prompt of at least {_FEWEST} tokens.",
        )
    with torch.inference_mode():
        reading = _Reading(model, states, verifier, proposer, budget)
        for firsts, behind_nearest, behind_others in _ROUNDS:
            for rank, first in enumerate(reading.first_tokens(firsts)):
                directions = reading.read_all(first, behind_others if rank else behind_nearest)
                if directions is not None:
                    return directions.rotation()
    raise StatesError(
        "No tokens have states of these lengths and angles.",
        "Check the model, the layer and what was seen, or leave rotated out.",
    )


class _Directions:
    """Directions before and after the turn, by all states read so far."""

    def __init__(self, width: int, noise: float) -> None:
        self._noise = noise  # relative to the length of a state
        self.plain = torch.empty(0, width, dtype=torch.float64)
        self.seen = torch.empty(0, width, dtype=torch.float64)
        self._find()

    def add(self, plain: Float[Tensor, " d"], seen: Float[Tensor, " d"]) -> None:
        """Take in one state, as it is computed and as it was seen."""
        self.plain = torch.cat([self.plain, plain[None].double().cpu()])
        self.seen = torch.cat([self.seen, seen[None].double().cpu()])
        self._find()

    def drop(self) -> None:
        """Leave out the state taken in last."""
        self.plain, self.seen = self.plain[:-1], self.seen[:-1]
        self._find()

    def _find(self) -> None:
        mixed, sizes, before = torch.linalg.svd(self.plain, full_matrices=False)
        after = mixed.T @ self.seen / sizes[:, None].clamp_min(1e-300)
        lengths = self.seen.norm(dim=1)
        blur = (mixed * lengths[:, None]).norm(dim=0) / sizes.clamp_min(1e-300)
        clear = blur <= _BLURRED
        self._before, self._after, self._blur = before[clear], after[clear], blur[clear]

    def away(
        self, plain: Float[Tensor, "candidate d"], seen: Float[Tensor, " d"]
    ) -> Float[Tensor, " candidate"]:
        """How far candidates are from what was seen, as far as that is known; noise is at most 1."""
        exact, turned = plain.double().cpu(), seen.double().cpu()
        unit = self._noise * float(turned.norm())
        apart = (exact @ self._before.T - turned @ self._after.T).abs() / (unit * (1 + self._blur))
        longer = (exact.norm(dim=1) - turned.norm()).abs() / unit
        return torch.cat([apart, longer[:, None]], dim=1).amax(dim=1)

    def turned_back(self, seen: Float[Tensor, "position d"], mean: Tensor, covariance: Tensor) -> Tensor:
        """Plain states as they most likely are, by what is known of them."""
        known = seen.double().cpu() @ self._after.T
        across = self._before @ covariance
        inner = across @ self._before.T
        inner += 1e-6 * inner.diagonal().mean() * torch.eye(len(inner), dtype=inner.dtype)
        gain = torch.linalg.solve(inner, across)
        plain: Tensor = mean + (known - self._before @ mean) @ gain
        return plain

    def rotation(self) -> Float[Tensor, "d d"]:
        """The rotation nearest to what turns all plain states into those seen; where none was read, any."""
        left, _, right = torch.linalg.svd(self.plain.T @ self.seen)
        turn: Tensor = left @ right
        return turn


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
        rounding = max(verifier.cells(rows).roundoff for rows in states)
        self._noise = safety(model.dtype) * verifier.noise.relative + rounding
        statistics = statistics_of(model, verifier.tap)
        self._mean = statistics.mean.cpu()
        self._covariance = ((statistics.axes * statistics.spread) @ statistics.axes.T).cpu()
        self._expectation = Expectation(model)
        self._first = likely_first(model)
        self._lengths = torch.full((model.vocab_size,), math.inf, dtype=torch.float64)

    def first_tokens(self, most: int) -> list[int]:
        """Of so many likely tokens those whose first state is as long as the one seen, nearest first."""
        order = self._first[:most]
        rest = order[torch.isinf(self._lengths[order])]
        prefix, seen = self._model.prefix(self._verifier.tap), self._states[0][0]
        nothing = _Directions(len(seen), self._noise)
        for ids in rest.split(prefix.max_candidates) if len(rest) else ():
            self._lengths[ids] = self._test(prefix, ids, nothing, seen)
        return [int(token) for token in self._lengths.argsort() if self._lengths[token] <= 1]

    def read_all(self, first: int, seconds: int) -> _Directions | None:
        """Read all prompts; None where no token makes a state of them, of so many tried as the second."""
        directions = _Directions(self._states[0].shape[1], self._noise)
        for number, rows in enumerate(self._states):
            if not self._read(rows, directions, None if number else first, seconds):
                return None
        return directions

    def _read(
        self, rows: Float[Tensor, "position d"], directions: _Directions, first: int | None, seconds: int
    ) -> bool:
        """Read one prompt. While few directions are known, another token than the right one may fit.

        So from a position at which none does it is gone back to the last one that has another.
        """
        prefix, ids = self._model.prefix(self._verifier.tap), list[int]()
        found: list[Iterator[int]] = []  # tokens that fit, at every position read and the next
        while len(ids) < len(rows):
            at = len(ids)
            if len(found) == at:
                most = seconds if first is not None and at == 1 else self._model.vocab_size
                if first is not None and at == 0:
                    found.append(iter([first]))
                else:
                    found.append(self._fitting(prefix, ids, directions, rows, most))
            token = next(found[at], None)
            if token is not None:
                ids.append(token)
                directions.add(self._verifier.observe(prefix.extend(torch.tensor([token])))[0], rows[at])
                continue
            if at == 0 or len(directions.plain) > _CERTAIN:
                return False
            found.pop()
            ids.pop()
            directions.drop()
            prefix.crop(len(ids))
        return True

    def _fitting(
        self,
        prefix: Prefix,
        ids: list[int],
        directions: _Directions,
        rows: Float[Tensor, "position d"],
        most: int,
    ) -> Iterator[int]:
        """Tokens that fit behind those read, as they are found; of a batch, the nearest first."""
        at = len(ids)
        for some in growing(self._order(ids, directions, rows, at)[:most], prefix.max_candidates):
            away = self._test(prefix, some, directions, rows[at])
            for index in away.argsort()[: int((away <= 1).sum())].tolist():
                yield int(some[index])

    def _test(
        self, prefix: Prefix, ids: Int[Tensor, " candidate"], directions: _Directions, seen: Tensor
    ) -> Float[Tensor, " candidate"]:
        self._budget.check(len(ids))
        self._budget.tests += len(ids)
        return directions.away(self._verifier.observe(prefix.try_tokens(ids)), seen)

    def _order(
        self, ids: list[int], directions: _Directions, rows: Float[Tensor, "position d"], at: int
    ) -> Int[Tensor, " vocabulary"]:
        """All tokens, most likely first: by what is known of the states, and by what the model expects."""
        plain = directions.turned_back(rows, self._mean, self._covariance).to(rows)[None]
        valid = torch.ones(plain.shape[:2], dtype=torch.bool, device=plain.device)
        scores = self._proposer.score(plain, valid)
        expected = self._expectation.behind(ids)
        if expected is None:
            return scores.order(0, at).cpu() if ids or len(directions.plain) else self._first
        return together(scores.at(scores.row(0, at))[0].cpu(), expected.cpu())
