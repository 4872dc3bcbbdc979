"""Quantisation carried on through the network: every block sees what was stored of the layer below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from preimage.devices import BATCH_TOKENS, by_device
from preimage.geometry.grids import QuantiserGrid
from preimage.geometry.quantiser import Quantiser
from preimage.layers import Layer, parse_layers
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.states.layout import Group, group_by_length

_ROWS = 2**14  # states stored at once


class Stored(NamedTuple):
    """The last states of a layer as they were stored, and the mean of |h| before."""

    grid: QuantiserGrid
    codes: Int[Tensor, "prompt d"]
    mean_coordinate: float

    def to(self, device: torch.device | str) -> Stored:
        """The same elsewhere."""
        return Stored(self.grid.to(device), self.codes.to(device), self.mean_coordinate)


def propagate(
    model: LanguageModel,
    ids: Sequence[Sequence[int]],
    quantiser: Quantiser,
    layers: Sequence[Layer],
    progress: Progress = silent,
) -> dict[Layer, Stored]:
    """The last states of every prompt at ``layers``, each layer computed from the stored one below it.

    Steps are fitted to all positions of all prompts of a layer, because all of them are stored. Every
    position of one layer is held at a time: prompts of one length after another, position by position.
    """
    groups = group_by_length([len(row) for row in ids])
    shapes = [(len(group.prompts), group.length, model.d_model) for group in groups]
    last = _last_rows(groups).to(model.device)
    order = parse_layers("all", model.n_layers)
    deepest = max(order.index(layer) for layer in layers)
    stored: dict[Layer, Stored] = {}
    tokens = [torch.tensor([list(ids[i]) for i in group.prompts]) for group in groups]
    states = [_in_batches(model, part, lambda some: model.states(some, [0])[0]) for part in tokens]
    for number, layer in enumerate(order[: deepest + 1]):
        progress(number, deepest + 1, f"layers carried on at {quantiser.bits} bits")
        if number:
            lift = partial(model.lift, layer=order[number - 1], to=layer)
            states = [_in_batches(model, part, lift) for part in states]
        flat = torch.cat([part.flatten(0, 1) for part in states])  # row d
        grid = quantiser.fit(flat)
        if layer in layers:
            at_last, ends = grid.at(last), flat[last]
            stored[layer] = Stored(at_last, at_last.encode(ends), float(ends.double().abs().mean()))
        for rows in torch.arange(len(flat), device=flat.device).split(_ROWS):
            some = grid.at(rows)
            flat[rows] = some.decode(some.encode(flat[rows])).to(flat.dtype)
        parts = flat.split([prompts * length for prompts, length, _ in shapes])
        states = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return {layer: stored[layer] for layer in layers}


def _last_rows(groups: Sequence[Group]) -> Int[Tensor, " prompt"]:
    """The row of every prompt's last position, where all positions of all groups lie one after another."""
    last, start = torch.empty(sum(len(group.prompts) for group in groups), dtype=torch.long), 0
    for group in groups:
        count = len(group.prompts)
        last[list(group.prompts)] = start + torch.arange(1, count + 1) * group.length - 1
        start += count * group.length
    return last


def _in_batches(
    model: LanguageModel, prompts: Shaped[Tensor, "prompt position *d"], run: Callable[[Tensor], Tensor]
) -> Float[Tensor, "prompt position d_model"]:
    """``run`` on as many prompts at a time as go through the model together."""
    size = max(1, by_device(BATCH_TOKENS, model.device) // prompts.shape[1])
    return torch.cat([run(some) for some in prompts.split(size)])
