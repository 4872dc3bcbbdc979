"""Quantisation carried on through the network: every block sees what was stored of the layer below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.geometry.quantisers import Grid, Quantiser
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent

_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
_ROWS = 2**14  # stored at once


class Stored(NamedTuple):
    """The last states of a layer as they were stored, and the mean of |h| before."""

    grid: Grid
    codes: Int[Tensor, "prompt d"]
    mean_coordinate: float

    def to(self, device: torch.device | str) -> Stored:
        """The same elsewhere."""
        step, zero = self.grid.step.to(device), self.grid.zero.to(device)
        grid = Grid(step, zero, self.grid.first, self.grid.last)
        return Stored(grid, self.codes.to(device), self.mean_coordinate)


def propagate(
    model: LanguageModel,
    ids: Sequence[Sequence[int]],
    quantiser: Quantiser,
    layers: Sequence[Layer],
    progress: Progress = silent,
) -> dict[Layer, Stored]:
    """The last states of every prompt at ``layers``, each layer computed from the stored one below it.

    Steps are fitted to all positions of all prompts of a layer, because all of them are stored. Every
    position of one layer is held at a time.
    """
    lengths = sorted({len(row) for row in ids})
    groups = [[i for i, row in enumerate(ids) if len(row) == length] for length in lengths]
    shapes = [(len(group), length, model.d_model) for group, length in zip(groups, lengths, strict=True)]
    ends, start = torch.empty(len(ids), dtype=torch.long), 0
    for group, (count, length, _) in zip(groups, shapes, strict=True):
        ends[group] = start + torch.arange(1, count + 1) * length - 1
        start += count * length
    ends = ends.to(model.device)
    order: list[Layer] = [*range(model.n_layers + 1), "final"]
    deepest = max(order.index(layer) for layer in layers)
    found: dict[Layer, Stored] = {}
    states = [_first(model, torch.tensor([list(ids[i]) for i in group])) for group in groups]
    for number, layer in enumerate(order[: deepest + 1]):
        progress(number, deepest + 1, f"layers carried on at {quantiser.bits} bits")
        if number:
            states = [_next(model, part, order[number - 1], layer) for part in states]
        flat = torch.cat([part.flatten(0, 1) for part in states])
        grid = quantiser.fit(flat)
        if layer in layers:
            last = grid.at(ends)
            found[layer] = Stored(last, last.encode(flat[ends]), float(flat[ends].double().abs().mean()))
        for rows in torch.arange(len(flat), device=flat.device).split(_ROWS):
            some = grid.at(rows)
            flat[rows] = some.decode(some.encode(flat[rows])).to(flat.dtype)
        parts = flat.split([count * length for count, length, _ in shapes])
        states = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return {layer: found[layer] for layer in layers}


def _first(model: LanguageModel, ids: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt position d"]:
    return torch.cat([model.states(some, [0])[0] for some in ids.split(_prompts(model, ids.shape[1]))])


def _next(
    model: LanguageModel, states: Float[Tensor, "prompt position d"], layer: Layer, to: Layer
) -> Float[Tensor, "prompt position d"]:
    parts = states.split(_prompts(model, states.shape[1]))
    return torch.cat([model.lift(some, layer, to) for some in parts])


def _prompts(model: LanguageModel, length: int) -> int:
    """How many go through the model together."""
    return max(1, _BATCH_TOKENS.get(model.device.type, _BATCH_TOKENS["cpu"]) // length)
