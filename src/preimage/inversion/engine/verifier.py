"""The verifier: the only thing that decides whether a token is right.

A state that was stored in fewer bits than it was computed in is known up to a cell, coordinate by coordinate
(``states.stored_cells``): a candidate is compared with the nearest point of that cell. Outliers are weighted
down (``states.outlier_weights``), so that what is allowed follows the noise and not the length of the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import by_device
from preimage.distances import norms
from preimage.errors import OptionError
from preimage.inversion.baselines.published import UncachedPrefix
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.first_states import known_first_states
from preimage.layers import Layer
from preimage.models import LanguageModel, Prefix
from preimage.observations import Observation, Site, Tap
from preimage.states import (
    Cells,
    Noise,
    may_be_stored,
    noise_radius,
    outlier_weights,
    safety,
    stored_cells,
    tempered,
    view,
)

# Radii at which another token is far: where all tested tokens are, nothing else can fit but tokens of almost
# the same embedding, and those are tested.
FAR = 16.0
_FAR_OF_CELL = 0.25  # of how far states of one cell are from its centre, where that is more
_FEWEST = 16  # coordinates without which tokens nobody tried may coincide by chance: nothing is far
_SLACK = 0.25  # of the radius, where that is calibrated
# Radii that another shape of a pass may put between states of attention sinks, on a GPU, and the tokens from
# which on it takes other kernels.
ANOTHER_SHAPE = 64.0
LARGE = {"cpu": 0, "cuda": 12288}


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
    def radii_of_each(self) -> list[list[float]]:
        """The same of several prompts."""
        return self.radius.tolist()

    @cached_property
    def reaches(self) -> list[float]:
        """The reach at each position."""
        return self.reach.tolist()

    @cached_property
    def far(self) -> Float[Tensor, "*row"]:
        """How far from the target another token is far, at each position.

        ``FAR`` reaches, and a part of how far states of one cell are from its centre: of tokens that lie
        nearer to a wide cell some that were not tried may lie in it. The median width counts: coordinates
        that are known far less well than the others say nothing of a token.
        """
        if self.low.shape[-1] < _FEWEST:
            return torch.full_like(self.reach, math.inf)
        far = FAR * self.reach
        if self.low is not self.high:
            width = self.high - self.low if self.weights is None else (self.high - self.low) * self.weights
            closed = width.masked_fill(torch.isinf(width), math.nan).nanmedian(dim=-1).values
            spread = closed.nan_to_num(nan=math.inf) * math.sqrt(width.shape[-1] / 12)  # as if evenly spread
            far = torch.maximum(far, _FAR_OF_CELL * spread.cpu())
        return far

    @cached_property
    def fars(self) -> list[float]:
        """The same as numbers."""
        return self.far.tolist()

    @property
    def fine(self) -> bool:
        """Whether states are known exactly, and in enough coordinates."""
        return self.low is self.high and self.low.shape[-1] >= _FEWEST

    @cached_property
    def coarse(self) -> int:
        """At how many positions cells are so wide that a token far from them proves little."""
        if self.fine:
            return 0
        return sum(far > 1.01 * FAR * reach for far, reach in zip(self.fars, self.reaches, strict=True))

    def away(self, seen: Float[Tensor, "*other d"], rows: Any = ...) -> Float[Tensor, "*result"]:
        """How far states are from what was observed, all of it or some rows, float64."""
        # beyond float64 is far, and looking for it would wait for a GPU
        return norms(self._outside(seen, rows, torch.float64), held=False)

    def roughly_away(self, seen: Float[Tensor, "*other d"]) -> Float[Tensor, "*result"]:
        """About as far, float32: it tells which of many are worth an exact distance."""
        distances: Tensor = torch.linalg.vector_norm(self._outside(seen, ..., torch.float32), dim=-1)
        return distances

    def _outside(
        self, seen: Float[Tensor, "*other d"], rows: Any, dtype: torch.dtype
    ) -> Float[Tensor, "*result d"]:
        """By how much states are off, coordinate by coordinate."""
        exact, low = seen.to(dtype), self.low[rows].to(dtype)
        if self.low is self.high:
            difference = exact - low
        else:
            difference = (exact - self.high[rows].to(dtype)).clamp_min(0) + (low - exact).clamp_min(0)
        return difference if self.weights is None else difference * self.weights[rows].to(dtype)

    def missing(self, seen: Float[Tensor, "*row d"]) -> Float[Tensor, "*row d"]:
        """Which way a state would have to move: against the gradient of half its squared distance."""
        exact = seen.to(torch.float64)
        short = torch.minimum(torch.maximum(exact, self.low), self.high) - exact
        return short if self.weights is None else short * self.weights.square()


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
        observation: Observation | None = None,
    ) -> None:
        seen = observation or Observation()
        self._model, self._tolerance, self._stored = model, tolerance, seen.stored
        self.tap: Tap = tap
        self.layer: Layer = tap.block if isinstance(tap, Site) else tap  # by which results name it
        self.noise, self.observe, self.kept = noise, view(seen), seen.kept
        self.plain = seen.plain and seen.stored is None  # states as they are

    def cells(self, observed: Float[Tensor, "position d"]) -> Cells:
        """What one prompt's numbers may have been before they were stored.

        At layer 0 no codes are looked for: embeddings are on a lattice where the weights were quantised.
        """
        return stored_cells(observed, self._stored, self._model.dtype, codes=self.layer != 0)

    def require_above_noise(self, observed: Float[Tensor, "position d"]) -> None:
        """Refuse a tolerance that states stored as these cannot meet."""
        if self._tolerance is None:
            return
        lowest = self.noise.relative + self.cells(observed).roundoff
        if self._tolerance < lowest:
            raise OptionError(
                f"A tolerance of {self._tolerance:g} lies below the noise floor of layer {self.tap}, "
                f"{lowest:.3g}.",
                "Give a larger one, or none to have it calibrated.",
            )

    def target(self, observed: Float[Tensor, "position d"]) -> Target:
        """One prompt's observed states, ready to be compared with, on the model's device."""
        return self.targets([observed])[0]

    def targets(
        self,
        observed: Sequence[Float[Tensor, "_ d"]],
        padded: Float[Tensor, "prompt position d"] | None = None,
    ) -> Target:
        """The same of several prompts, padded to one length: prompt x position."""
        if padded is None:
            padded = pad_sequence(list(observed), batch_first=True).to(self._model.device)
        exact = padded.to(torch.float64)
        lengths = norms(exact).cpu()
        weights = outlier_weights(exact)
        calm = norms(tempered(exact, weights)).cpu()
        radius = noise_radius(self.noise, calm, self._model.dtype)
        if self._tolerance is not None:
            given = self._tolerance * lengths
            slack = torch.minimum(safety(self._model.dtype) * self.noise.relative * lengths, 4 * radius)
            return Target(exact, exact, None, given, given + slack)
        low, high = self._cells(observed, padded, exact)
        return Target(low, high, weights.to(torch.float64), radius, (1 + _SLACK) * radius)

    def behind(self, own: Float[Tensor, "*prompt known d"], target: Target) -> Target:
        """Targets behind positions that are not compared: everything fits there, and nothing else can."""
        low = own.to(target.low)
        sides = [torch.cat([low, side], dim=-2) for side in (target.low, target.high)]
        if target.high is target.low:
            sides[1] = sides[0]
        weights = target.weights
        if weights is not None:
            weights = torch.cat([torch.ones_like(low), weights], dim=-2)
        free = torch.ones(low.shape[:-1], dtype=target.radius.dtype)
        radius = torch.cat([math.inf * free, target.radius], dim=-1)
        reach = torch.cat([0 * free, target.reach], dim=-1)
        return Target(sides[0], sides[1], weights, radius, reach)

    def _cells(
        self, observed: Sequence[Tensor], padded: Tensor, exact: Float[Tensor, "prompt position d"]
    ) -> tuple[Float[Tensor, "prompt position d"], Float[Tensor, "prompt position d"]]:
        """The ends of all cells, found out prompt by prompt where a first look does not rule them out."""
        low = high = exact
        some = list(range(len(observed)))
        if self._stored is None:
            lengths = torch.tensor([len(one) for one in observed])
            some = may_be_stored(padded, lengths, self._model.dtype).nonzero().flatten().tolist()
        for index in some:
            cells = self.cells(observed[index])
            if cells.exact:
                continue
            if low is high:
                low, high = exact.clone(), exact.clone()
            for side, found in ((low, cells.low), (high, cells.high)):
                side[index, : len(found)] = found.to(exact.device)
        return low, high

    def distances(
        self, prefix: CandidatePrefix, ids: Int[Tensor, " candidate"], target: Target
    ) -> Float[Tensor, " candidate"]:
        """How far F(v; prefix, t) of every candidate v is from the target, on the CPU."""
        first = None
        if isinstance(prefix, Prefix) and not len(prefix):
            first = known_first_states(self._model, self.tap)
        states = prefix.try_tokens(ids) if first is None else first[ids.to(first.device)]
        return target.away(self.observe(states)).cpu()

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
        """Distance at every position after one pass over a whole prompt: the final word.

        The pass is a plain one. Where that is off by a little more than noise, the states may have been
        computed among others: on a GPU a large batch has other kernels, which round otherwise. The shape that
        reproduces more of them, from the left, counts.
        """
        row = torch.tensor([list(ids)])
        states = self._model.states(row, (self.tap,))[self.tap][0]
        plain: list[float] = target.away(self.observe(states)).tolist()
        at = _agreeing(plain, target.radii)
        near = at < len(plain) and plain[at] <= ANOTHER_SHAPE * target.radii[at]
        if not near or not by_device(LARGE, self._model.device):
            return plain
        among: list[float] = target.away(self.observe(self.states_in_large_batch(row)[0])).tolist()
        return among if _agreeing(among, target.radii) > at else plain

    def states_in_large_batch(self, rows: Int[Tensor, "row position"]) -> Float[Tensor, "row position d"]:
        """States of some prompts as a large batch has them, filled up with the same prompts."""
        copies = -(-by_device(LARGE, self._model.device) // max(1, rows.numel()))
        return self._model.states(rows.repeat(max(1, copies), 1), (self.tap,))[self.tap][: len(rows)]


def _agreeing(distances: Sequence[float], radii: Sequence[float]) -> int:
    """How many positions are within the radius, counted from the left."""
    pairs = enumerate(zip(distances, radii, strict=False))
    return next((index for index, (away, radius) in pairs if not away <= radius), len(distances))


def distances_of(known: Mapping[int, float], vocab_size: int) -> Float[Tensor, " vocabulary"]:
    """Known distances by token; infinite where a token was not tested."""
    tested = torch.full((vocab_size,), math.inf, dtype=torch.float64)
    tested[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
    return tested
