"""The verifier: the only thing that decides whether a token is right.

A state that was stored in a coarser type than it was computed in is known up to its rounding cell, coordinate
by coordinate: a candidate is compared with the nearest point of that cell. Outliers are weighted down
(``states.outlier_weights``), so that what is allowed follows the noise and not the length of the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import norms
from preimage.errors import OptionError
from preimage.inversion.baselines.published import UncachedPrefix
from preimage.inversion.engine.budget import Budget
from preimage.layers import Layer
from preimage.models import LanguageModel, Prefix
from preimage.observations import Site, Tap
from preimage.states import (
    Noise,
    Observation,
    noise_radius,
    outlier_weights,
    residual_stream,
    rounding_cell,
    safety,
    storage_roundoff,
    stored_type,
    tempered,
)

# Radii at which another token is far: where all tested tokens are, nothing else can fit but tokens of almost
# the same embedding, and those are tested.
FAR = 32.0
_SLACK = 0.25  # of the radius, where that is calibrated


# A prefix on which candidates are tried: cached, or recomputed as published.
CandidatePrefix: TypeAlias = Prefix | UncachedPrefix


@dataclass(frozen=True)
class Target:
    """What candidates are compared with: observed states, and how near a candidate's must come.

    ``radius`` is the largest accepted distance. ``reach`` adds what another shape of the pass may add to a
    distance: a token within reach may fit, and a plain pass over the whole prompt decides.
    """

    low: Float[Tensor, "*row d"]
    high: Float[Tensor, "*row d"]
    weights: Float[Tensor, "*row d"] | None
    radius: Float[Tensor, "*row"]
    reach: Float[Tensor, "*row"]

    def __getitem__(self, rows: Any) -> Target:
        low, weights = self.low[rows], None if self.weights is None else self.weights[rows]
        high = low if self.high is self.low else self.high[rows]
        return Target(low, high, weights, self.radius[rows], self.reach[rows])

    def __len__(self) -> int:
        return len(self.low)

    @cached_property
    def radii(self) -> list[float]:
        """The radius at each position."""
        return self.radius.tolist()

    @cached_property
    def reaches(self) -> list[float]:
        """The reach at each position."""
        return self.reach.tolist()

    def away(self, seen: Float[Tensor, "*other d"]) -> Float[Tensor, "*result"]:
        """How far states are from what was observed, float64."""
        exact = seen.to(torch.float64)
        if self.low is self.high:
            difference = exact - self.low
        else:
            difference = (exact - self.high).clamp_min(0) + (self.low - exact).clamp_min(0)
        return norms(difference if self.weights is None else difference * self.weights)


class Verifier:
    """Compares F(v; prefix, t) with what was observed.

    A token is accepted at position t when it is no further away than ``tolerance`` * |h_t|; without one, than
    ``safety`` times the noise measured at this layer.
    """

    def __init__(
        self,
        model: LanguageModel,
        tap: Tap,
        *,
        noise: Noise,
        tolerance: float | None = None,
        observe: Observation = residual_stream,
    ) -> None:
        self._model, self._tolerance = model, tolerance
        self.tap: Tap = tap
        self.layer: Layer = tap.block if isinstance(tap, Site) else tap  # by which results name it
        self.noise, self.observe = noise, observe

    def require_above_noise(self, stored: torch.dtype) -> None:
        """Refuse a tolerance that states of this type cannot meet."""
        lowest = self.noise.relative + storage_roundoff(stored, self._model.dtype)
        if self._tolerance is not None and self._tolerance < lowest:
            raise OptionError(
                f"A tolerance of {self._tolerance:g} lies below the noise floor of layer {self.tap}, "
                f"{lowest:.3g}.",
                "Give a larger one, or none to have it calibrated.",
            )

    def target(self, observed: Float[Tensor, "*row d"]) -> Target:
        """Observed states, ready to be compared with, on the model's device."""
        exact = observed.to(self._model.device, torch.float64)
        lengths = norms(exact).cpu()
        weights = outlier_weights(exact)
        calm = norms(tempered(exact, weights)).cpu()
        radius = noise_radius(self.noise, calm, self._model.dtype)
        if self._tolerance is not None:
            given = self._tolerance * lengths
            slack = torch.minimum(safety(self._model.dtype) * self.noise.relative * lengths, 4 * radius)
            return Target(exact, exact, None, given, given + slack)
        stored = stored_type(observed)
        low = high = exact
        if storage_roundoff(stored, self._model.dtype):
            low, high = rounding_cell(observed.to(stored))
            low, high = low.to(exact.device), high.to(exact.device)
        return Target(low, high, weights.to(torch.float64), radius, (1 + _SLACK) * radius)

    def given(self, target: Target, rows: int) -> Target:
        """The same, with so many first positions that are not compared: their tokens are known."""
        if not rows:
            return target
        radius, reach = target.radius.clone(), target.reach.clone()
        radius[..., :rows], reach[..., :rows] = math.inf, 0.0  # everything fits, and nothing else can
        return replace(target, radius=radius, reach=reach)

    def distances(
        self, prefix: CandidatePrefix, ids: Int[Tensor, " candidate"], target: Target
    ) -> Float[Tensor, " candidate"]:
        """How far F(v; prefix, t) of every candidate v is from the target, on the CPU."""
        return target.away(self.observe(prefix.try_tokens(ids))).cpu()

    def test(
        self,
        prefix: CandidatePrefix,
        ids: Int[Tensor, " candidate"],
        target: Target,
        tested: Tensor,
        budget: Budget,
    ) -> None:
        """Put the distances of a batch of candidates into ``tested``, as far as the budget goes."""
        budget.check()
        ids = ids[: budget.tests_left]
        tested[ids] = self.distances(prefix, ids, target)
        budget.tests += len(ids)

    def whole_sequence(self, ids: Sequence[int], target: Target) -> list[float]:
        """Distance at every position after one plain pass over a whole prompt: the final word."""
        states = self._model.states(torch.tensor([list(ids)]), (self.tap,))[self.tap][0]
        return target.away(self.observe(states)).tolist()


def distances_of(known: Mapping[int, float], vocab_size: int) -> Float[Tensor, " vocabulary"]:
    """Known distances by token; infinite where a token was not tested."""
    tested = torch.full((vocab_size,), math.inf, dtype=torch.float64)
    tested[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
    return tested
