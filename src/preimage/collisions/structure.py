"""Which prompts must have the same state, whatever the parameters are.

Tokens with bit-identical embeddings are one token to the model. At layer 0 a state is its token's embedding,
and its position's where there are absolute ones. Above, a state depends on the tokens its layer can see: all,
or where every block so far has a sliding window, the last of them. Constant prompts a^n and a^m agree where
positions enter through attention alone: every value row is the same, and so is their average.
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
Ids: TypeAlias = Sequence[int]


class Structure:
    """What a model cannot tell apart, whatever its weights."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._same: list[int] = same_rows(model.embedding_table).tolist()
        self._positions = absolute_positions(model)

    def key(self, ids: Ids, layer: Layer) -> Hashable:
        """Prompts with equal keys have the same state at the layer, for all parameters."""
        reach = self._model.receptive_field(layer)
        seen = tuple(self._same[token] for token in ids[-(reach or len(ids)) :])
        if self._positions:
            return len(ids), seen
        return seen[0] if len(set(seen)) == 1 else seen

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
            return CONSTANT if len({*one, *other}) == 1 else SAME_WINDOW
        if not near:
            return ""
        return SAME_TEXT if same_text(self._model, first, second) else UNEXPLAINED


def same_text(model: LanguageModel, first: Ids, second: Ids) -> bool:
    """Whether other ids are the same text; broken characters are no text."""
    text = model.decode(first)
    return text is not None and "\ufffd" not in text and text == model.decode(second)


def absolute_positions(model: LanguageModel) -> bool:
    """Whether a token's state at layer 0 depends on where it stands."""
    first, second = model.states(torch.tensor([[0, 0]]), (0,))[0][0]
    return not torch.equal(first, second)
