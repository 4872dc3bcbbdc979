"""All continuations of a prefix by one token: their states, and every pair of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions.confirmation import ConfirmedStructure
from preimage.collisions.options import CollisionOptions
from preimage.collisions.result import Continuation
from preimage.collisions.spacing import RowLabels, measure_spacing
from preimage.collisions.structure import IDENTICAL_EMBEDDINGS, UNEXPLAINED, Structure
from preimage.distances import require_finite
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.states import noise_floor


class PrefixScan:
    """Prefixes of one scan, each of which can be looked at alone."""

    def __init__(
        self,
        model: LanguageModel,
        prefixes: Sequence[tuple[int, ...]],
        layer: Layer,
        options: CollisionOptions,
    ) -> None:
        self.model, self.prefixes, self.layer, self.options = model, prefixes, layer, options
        self._floor = noise_floor(model, (layer,))[layer]

    @cached_property
    def _structure(self) -> Structure:
        return Structure(self.model, longest=max(map(len, self.prefixes)) + 1)

    def at(self, number: int) -> Continuation:
        """Every token after one prefix, compared with every other."""
        model, prefix, layer = self.model, self.prefixes[number], self.layer
        states = _every_token(model, prefix, layer)
        require_finite(states, f"Prefix {number}, layer {layer}, token")
        labels = _token_labels(model, prefix, layer, self._structure)
        spacing = measure_spacing(states, self._floor, labels, self.options)
        return Continuation(prefix, model.decode(prefix), layer, spacing)


@torch.inference_mode()
def _every_token(
    model: LanguageModel, prefix: Sequence[int], layer: Layer
) -> Float[Tensor, "vocabulary d_model"]:
    """The state of every token after the prefix."""
    cached = model.prefix(layer)
    cached.extend(torch.tensor(prefix))
    states = torch.empty(model.vocab_size, model.d_model, dtype=model.dtype, device=model.device)
    for chunk in torch.arange(model.vocab_size).split(cached.max_candidates):
        states[chunk] = cached.try_tokens(chunk)
    return states


def _token_labels(
    model: LanguageModel, prefix: tuple[int, ...], layer: Layer, structure: Structure
) -> RowLabels:
    """What the tokens after a prefix are; those that enter the model as one may have to have one state."""
    often = Counter(structure.same)
    twins = [token for token, first in enumerate(structure.same) if often[first] > 1]
    confirmed = ConfirmedStructure(model, [(*prefix, token) for token in twins or [0]], (layer,), structure)
    keys = {token: confirmed.key((*prefix, token), layer) for token in twins}

    def explain(first: int, second: int, near: bool) -> str:
        if first in keys and keys[first] == keys.get(second):
            return IDENTICAL_EMBEDDINGS
        return UNEXPLAINED if near else ""

    return RowLabels(
        ids=lambda row: (row,),
        text=lambda row: model.decode([row]),
        key=lambda row: keys.get(row, row),
        explain=explain,
    )
