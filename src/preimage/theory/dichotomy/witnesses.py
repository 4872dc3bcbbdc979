"""Distances of prompts at random parameters, against the line below which float64 cannot tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from preimage.collisions import last_states, most_terms, rounding_bounds
from preimage.distances import norms, row_distances
from preimage.layers import Layer
from preimage.models import LanguageModel

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Separation:
    """All pairs of prompts at one layer, over several draws; distances are relative to |h_i| + |h_j|.

    ``nearest`` and ``farthest`` are a pair's smallest and largest distance in any draw, ``bound`` what
    rounding may make, ``shape_noise`` how far a prompt was from itself when it was computed in another shape
    (None where none was possible).
    """

    layer: Layer
    nearest: Float[Tensor, "prompt prompt"]
    farthest: Float[Tensor, "prompt prompt"]
    bound: float
    shape_noise: float | None

    @cached_property
    def structural(self) -> list[tuple[int, int]]:
        """Pairs that no draw separates."""
        return _pairs(self.farthest <= self.bound)

    @property
    def disputed(self) -> list[tuple[int, int]]:
        """Pairs that some draws separate and others do not; the theorem gives them probability 0."""
        return _pairs((self.farthest > self.bound) & (self.nearest <= self.bound))


def measure_separation(
    draws: Iterable[LanguageModel], ids: Sequence[Ids], layers: Sequence[Layer]
) -> list[Separation]:
    """Every pair of prompts at every layer, over float64 models of one architecture."""
    separations: dict[Layer, Separation] = {}
    for drawn in draws:
        last = last_states(drawn, ids, layers)
        bounds = rounding_bounds(drawn, ids, last, most_terms(drawn, ids))
        noise = _shape_noise(drawn, ids, last)
        for layer, states in last.items():
            away = _relative(states)
            one = Separation(layer, away, away, bounds[layer], None if noise is None else noise[layer])
            separations[layer] = one if layer not in separations else _both(separations[layer], one)
    return [separations[layer] for layer in layers]


def _shape_noise(
    model: LanguageModel, ids: Sequence[Ids], last: dict[Layer, Float[Tensor, "prompt d_model"]]
) -> dict[Layer, float] | None:
    """How far the same prompts are from themselves with another token after them, relative to 2 |h|.

    None where no prompt leaves room for one more token.
    """
    places = [i for i, row in enumerate(ids) if model.max_length is None or len(row) < model.max_length]
    if not places:
        return None
    other = last_states(model, [ids[place] for place in places], list(last), follow=0)
    return {
        layer: float((row_distances(other[layer], states[places]) / norms(states[places])).max()) / 2
        for layer, states in last.items()
    }


def _relative(states: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt prompt"]:
    """|h_i - h_j| / (|h_i| + |h_j|) for all pairs, by differences."""
    sizes = norms(states)
    rows = zip(states, sizes, strict=True)
    return torch.stack([row_distances(row[None], states) / (size + sizes) for row, size in rows])


def _both(one: Separation, other: Separation) -> Separation:
    return Separation(
        one.layer,
        torch.minimum(one.nearest, other.nearest),
        torch.maximum(one.farthest, other.farthest),
        max(one.bound, other.bound),
        None if other.shape_noise is None else max(one.shape_noise or 0.0, other.shape_noise),
    )


def _pairs(mask: Bool[Tensor, "prompt prompt"]) -> list[tuple[int, int]]:
    """The pairs i < j that a mask picks."""
    return [(first, second) for first, second in mask.triu(1).nonzero().tolist()]
