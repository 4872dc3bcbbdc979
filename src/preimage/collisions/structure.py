"""Which prompts must have the same state, whatever the parameters are.

Tokens with bit-identical embeddings are one token to the model. At layer 0 a state is its token's embedding,
and its position's where there are absolute ones. Above, a state depends on the tokens its layer can see: all,
or where every block so far has a sliding window, the last of them. Constant prompts a^n and a^m agree where
positions enter through attention alone: every value row is the same, and so is their average. For the same
reason a^n s and a^m s agree as long as every block so far has a window and both runs fill it. Under ALiBi a
word repeated, s^n and s^m, agrees at layer 1: each repetition weighs its tokens like the one before, times
one factor for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import torch

from preimage.distances import same_rows
from preimage.layers import Layer
from preimage.models import LanguageModel

UNEXPLAINED = "unexplained"
SAME_TEXT = "same text"
SAME_LAST_TOKEN = "same last token at layer 0"
CONSTANT = "constant prompts"
IDENTICAL_EMBEDDINGS = "identical embeddings"
SAME_WINDOW = "same tokens in the sliding window"
FULL_WINDOW = "a run that fills the sliding window"
SAME_WORD = "one word repeated, at layer 1 under ALiBi"
Ids: TypeAlias = Sequence[int]


class Structure:
    """What a model cannot tell apart, whatever its weights."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._same: list[int] = same_rows(model.embedding_table).tolist()
        self._positions = absolute_positions(model)
        self._linear = linear_biases(model)
        layers: list[Layer] = [*range(model.n_layers + 1), "final"]
        self._reach = {layer: model.receptive_field(layer) for layer in layers}

    def key(self, ids: Ids, layer: Layer) -> Hashable:
        """Prompts with equal keys have the same state at the layer, for all parameters."""
        seen = self._seen(ids, layer)
        if self._positions:
            return len(ids), seen
        if len(set(seen)) == 1:
            return seen[:1]
        window = self._reach[1]
        if window is not None and self._reach[layer] is not None:
            return _shortened(seen, window - 1)
        return _word(seen) if layer == 1 and self._linear else seen

    def explain(self, first: Ids, second: Ids, layer: Layer, *, near: bool) -> str:
        """Why two prompts have the same state, "unexplained" where they do (``near``) and nothing says why.

        Empty for states that are apart, and may be.
        """
        if self.key(first, layer) == self.key(second, layer):
            one, other = ([self._same[token] for token in ids] for ids in (first, second))
            if one == other:
                return IDENTICAL_EMBEDDINGS
            if layer == 0:
                return SAME_LAST_TOKEN
            if len({*one, *other}) == 1:
                return CONSTANT
            if self._reach[layer] is None:
                return SAME_WORD
            seen = self._seen(first, layer)
            same = len(set(seen)) == 1 or seen == self._seen(second, layer)
            return SAME_WINDOW if same else FULL_WINDOW
        if not near:
            return ""
        return SAME_TEXT if same_text(self._model, first, second) else UNEXPLAINED

    def _seen(self, ids: Ids, layer: Layer) -> tuple[int, ...]:
        """The tokens a state can depend on, equal ones under one name."""
        return tuple(self._same[token] for token in ids[-(self._reach[layer] or len(ids)) :])


def same_text(model: LanguageModel, first: Ids, second: Ids) -> bool:
    """Whether other ids are the same text; broken characters are no text."""
    text = model.decode(first)
    return text is not None and "\ufffd" not in text and text == model.decode(second)


def absolute_positions(model: LanguageModel) -> bool:
    """Whether a token's state at layer 0 depends on where it stands."""
    first, second = model.states(torch.tensor([[0, 0]]), (0,))[0][0]
    return not torch.equal(first, second)


def linear_biases(model: LanguageModel) -> bool:
    """Whether positions enter as ALiBi: a bias of attention that grows with the distance."""
    backbone = model.anatomy.backbone
    return any(bool(getattr(backbone, name)) for name in dir(backbone) if "alibi" in name)


def _shortened(seen: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A run at the beginning cut down to ``most`` tokens."""
    run = next((place for place, token in enumerate(seen) if token != seen[0]), len(seen))
    return seen[max(0, run - most) :]


def _word(seen: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest word of which the tokens are a repetition."""
    for length in range(1, len(seen)):
        if len(seen) % length == 0 and seen[:length] * (len(seen) // length) == seen:
            return seen[:length]
    return seen
