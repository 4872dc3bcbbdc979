"""Which prompts must have the same state, whatever the parameters are.

Tokens with bit-identical embeddings are one token to the model. At layer 0 a state is its token's embedding,
and its position's where there are absolute ones. Above, constant prompts a^n and a^m agree where positions
enter through attention alone: every value row is the same, and so is their average.
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
Ids: TypeAlias = Sequence[int]


class Structure:
    """What a model cannot tell apart, whatever its weights."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._same: list[int] = same_rows(model.embedding_table).tolist()
        self._positions = absolute_positions(model)

    def key(self, ids: Ids, layer: Layer) -> Hashable:
        """Prompts with equal keys have the same state at the layer, for all parameters."""
        seen = tuple(self._same[token] for token in ids)
        if layer == 0:
            return (len(seen), seen[-1]) if self._positions else seen[-1]
        if not self._positions and len(set(seen)) == 1:
            return seen[0]
        return seen

    def explain(self, first: Ids, second: Ids, layer: Layer, *, near: bool) -> str:
        """Why two prompts have the same state, "unexplained" where they do (``near``) and nothing says why.

        Empty for states that are apart, and may be.
        """
        if self.key(first, layer) == self.key(second, layer):
            if [self._same[token] for token in first] == [self._same[token] for token in second]:
                return IDENTICAL_EMBEDDINGS
            return SAME_LAST_TOKEN if layer == 0 else CONSTANT
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
