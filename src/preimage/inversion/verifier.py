"""The verifier: the only thing that decides whether a token is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.errors import OptionError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.states import SAFETY, Observation, residual_stream


@runtime_checkable
class Trial(Protocol):
    """A prefix on which candidates are tried: cached, or recomputed as published."""

    def try_tokens(self, ids: Int[Tensor, " candidate"]) -> Float[Tensor, "candidate d_model"]:
        """F(v; prefix, t) for each candidate v."""

    def try_embeddings(
        self, embeddings: Float[Tensor, "candidate d_embedding"]
    ) -> Float[Tensor, "candidate d_model"]:
        """The same for continuous embeddings; gradients flow."""

    def keep(self, row: int) -> None:
        """Make a row of the latest trial part of the prefix."""

    def extend(self, ids: Int[Tensor, " position"]) -> Float[Tensor, "position d_model"]:
        """Append tokens."""

    def crop(self, length: int) -> None:
        """Forget everything from a position on."""

    @property
    def max_candidates(self) -> int:
        """Candidates that fit in one batch."""


class Verifier:
    """Compares F(v; prefix, t) with what was observed.

    A token is accepted at position t when |F(v; prefix, t) - h_t| <= tolerance * |h_t|, in float64. The
    relative tolerance is ``SAFETY`` noise floors plus the rounding of the type the states were stored in.
    """

    def __init__(
        self,
        model: LanguageModel,
        layer: Layer,
        *,
        floor: float,
        roundoff: float = 0.0,
        tolerance: float | None = None,
        observe: Observation = residual_stream,
    ) -> None:
        if tolerance is not None and tolerance < floor + roundoff:
            raise OptionError(
                f"A tolerance of {tolerance:g} lies below the noise floor of layer {layer}, "
                f"{floor + roundoff:.3g}.",
                "Give a larger one, or none to have it calibrated.",
            )
        self._model = model
        self.layer: Layer = layer
        self.observe = observe
        self.floor = floor
        self.relative = SAFETY * floor + roundoff if tolerance is None else tolerance

    def tolerances(self, observed: Float[Tensor, "position d"]) -> list[float]:
        """The largest accepted distance at each position."""
        return [self.relative * norm for norm in norms(observed).tolist()]

    def distances(
        self,
        prefix: Trial,
        ids: Int[Tensor, " candidate"],
        observed: Float[Tensor, " d"],
    ) -> Float[Tensor, " candidate"]:
        """|F(v; prefix, t) - h_t| of every candidate, float64, on the CPU."""
        seen = self.observe(prefix.try_tokens(ids))
        return row_distances(seen, observed.to(seen.device)).cpu()

    def whole_sequence(self, ids: Sequence[int], observed: Float[Tensor, "position d"]) -> list[float]:
        """Distance at every position after one plain pass over a whole prompt: the final word."""
        states = self._model.states(torch.tensor([list(ids)]), (self.layer,))[self.layer][0]
        seen = self.observe(states)
        distances: list[float] = row_distances(seen, observed.to(seen.device)).tolist()
        return distances
