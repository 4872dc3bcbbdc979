"""Distances of prompts at random parameters, and the line below which float64 cannot tell them apart.

A state is computed by inner products of at most k terms, k the longest row of any matrix or the longest
prompt. Each is wrong by at most k units of rounding, relative to what went into it; a block makes a handful
one after another, counted here as eight. So l blocks bring in at most 8 (l + 1) k u, and what is above the
place where an error came in makes it larger by the condition of the map. The condition is measured, not
assumed: embeddings are moved by a relative 2^-36 and the largest relative answer at the layer is kept.

    bound(l) = 8 (l + 1) k u max(1, condition(l)),    u = 2^-53

This is about 1e-13 of a state's norm for a tiny model and 4e-11 at the top of SmolLM2's 30 blocks: far above
the 1e-16 to 1e-14 that equal states differ by, and far below what separates prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.layers import Layer
from preimage.models import LanguageModel

_PRODUCTS = 8  # one after another: norm, query and key, score, average, output, norm, up, down
_MOVED = 2.0**-36  # above rounding, and small enough for the answer to be linear
_TOKENS = 4096  # positions in one pass
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
    found: dict[Layer, Separation] = {}
    for drawn in draws:
        last = last_states(drawn, ids, layers)
        bounds = _rounding_bounds(drawn, ids, last)
        noise = _shape_noise(drawn, ids, last)
        for layer, states in last.items():
            away = _relative(states)
            one = Separation(layer, away, away, bounds[layer], None if noise is None else noise[layer])
            found[layer] = one if layer not in found else _both(found[layer], one)
    return [found[layer] for layer in layers]


def last_states(
    model: LanguageModel, ids: Sequence[Ids], layers: Sequence[Layer], follow: int | None = None
) -> dict[Layer, Float[Tensor, "prompt d_model"]]:
    """The last state of every prompt, prompts of one length together and nothing padded.

    With ``follow`` a token is put after each prompt: what comes later changes no state before it.
    """
    rows: dict[Layer, list[Tensor]] = {layer: [torch.empty(0)] * len(ids) for layer in layers}
    for places, batch in _batches(ids):
        position = batch.shape[1] - 1
        if follow is not None:
            batch = torch.cat([batch, torch.full((len(batch), 1), follow)], dim=1)
        for layer, states in model.states(batch, layers).items():
            for place, state in zip(places, states[:, position], strict=True):
                rows[layer][place] = state
    return {layer: torch.stack(states) for layer, states in rows.items()}


def _rounding_bounds(
    model: LanguageModel, ids: Sequence[Ids], last: dict[Layer, Float[Tensor, "prompt d_model"]]
) -> dict[Layer, float]:
    """The bound of this module's first lines, for each layer."""
    sizes = [max(matrix.shape) for block in model.anatomy.blocks for matrix in block.parameters()]
    terms = max(*sizes, *map(len, ids))
    unit = torch.finfo(torch.float64).eps / 2
    generator = torch.Generator().manual_seed(0)
    condition: dict[Layer, float] = dict.fromkeys(last, 1.0)
    for places, batch in _batches(ids):
        embedded = model.embed(batch)
        signs = torch.randint(0, 2, embedded.shape, generator=generator) * 2 - 1
        with torch.inference_mode():
            moved = model.run(embeddings=embedded * (1 + _MOVED * signs), layers=list(last))
        for layer, states in moved.items():
            before = last[layer][places]
            answer = float((row_distances(states[:, -1], before) / norms(before)).max()) / _MOVED
            condition[layer] = max(condition[layer], answer)
    blocks = {layer: model.n_layers + 1 if layer == "final" else layer for layer in last}
    return {
        layer: _PRODUCTS * (blocks[layer] + 1) * terms * unit * factor for layer, factor in condition.items()
    }


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


def _batches(ids: Sequence[Ids]) -> list[tuple[list[int], Int[Tensor, "batch position"]]]:
    """Prompts of one length, a pass at a time, with their places."""
    lengths: dict[int, list[int]] = {}
    for place, prompt in enumerate(ids):
        lengths.setdefault(len(prompt), []).append(place)
    found = []
    for length, places in lengths.items():
        size = max(1, _TOKENS // length)
        for start in range(0, len(places), size):
            part = places[start : start + size]
            found.append((part, torch.tensor([ids[place] for place in part])))
    return found


def _relative(states: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt prompt"]:
    """|h_i - h_j| / (|h_i| + |h_j|) for all pairs, by differences."""
    sizes = norms(states)
    rows = [
        row_distances(row[None], states) / (size + sizes) for row, size in zip(states, sizes, strict=True)
    ]
    return torch.stack(rows)


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
