"""Which prompts may have to have the same state, whatever the parameters are: what is known, as hypotheses.

Tokens that enter block 1 as the same row to the bit are one token to the model. At layer 0 a state is its
token's embedding, and its position's where there are absolute ones. Above, a state depends on the tokens its
layer can see: all, or where every block so far has a sliding window, the last of them. Constant prompts a^n
and a^m agree where positions enter through attention alone: every value row is the same, and so is their
average. For the same reason a^n s and a^m s agree as long as every block so far has a window and both runs
fill it. Under ALiBi a word repeated, s^n and s^m, agrees at layer 1: each repetition weighs its tokens like
the one before, times one factor for all.

Whether a module is of the kind that any of this holds for is not decided here: an attention sink or a
recurrent part breaks it, and no name tells. ``confirmation`` asks random parameters of the very module.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import torch

from preimage.distances import same_rows
from preimage.layers import Layer, all_layers
from preimage.models import LanguageModel

UNEXPLAINED = "unexplained"
SAME_LAST_TOKEN = "same last token at layer 0"
CONSTANT = "constant prompts"
IDENTICAL_EMBEDDINGS = "identical embeddings"
SAME_WINDOW = "same tokens in the sliding window"
FULL_WINDOW = "a run that fills the sliding window"
SAME_WORD = "one word repeated, at layer 1 under ALiBi"
Ids: TypeAlias = Sequence[int]
_TOKENS = 4096  # positions in one pass


class Structure:
    """What a model may be unable to tell apart, whatever its weights.

    ``longest``: how many positions tokens are compared at, where positions are absolute. ``reach``: how many
    of the last tokens each layer sees, None for all; by default what the config says.
    """

    def __init__(
        self, model: LanguageModel, longest: int = 1, reach: Mapping[Layer, int | None] | None = None
    ) -> None:
        self._positions = absolute_positions(model)
        self._linear = linear_biases(model)
        self.same = token_classes(model, longest if self._positions else 1)
        self.reach = dict(reach or {at: model.receptive_field(at) for at in all_layers(model.n_layers)})

    def key(self, ids: Ids, layer: Layer) -> Hashable:
        """Prompts with equal keys may have to have the same state at the layer, for all parameters."""
        seen = self._seen(ids, layer)
        if self._positions:
            return len(ids), seen
        if len(set(seen)) == 1:
            return seen[:1]
        window = self.reach[1]
        if window is not None and self.reach[layer] is not None:
            return _shortened(seen, window - 1)
        return shortest_word(seen) if layer == 1 and self._linear else seen

    def name(self, first: Ids, second: Ids, layer: Layer) -> str:
        """The family of two prompts with equal keys."""
        one, other = ([self.same[token] for token in ids] for ids in (first, second))
        if one == other:
            return IDENTICAL_EMBEDDINGS
        if layer == 0:
            return SAME_LAST_TOKEN
        if len({*one, *other}) == 1:
            return CONSTANT
        if self.reach[layer] is None:
            return SAME_WORD
        seen = self._seen(first, layer)
        same = len(set(seen)) == 1 or seen == self._seen(second, layer)
        return SAME_WINDOW if same else FULL_WINDOW

    def explain(self, first: Ids, second: Ids, layer: Layer, *, near: bool) -> str:
        """Why two prompts may have the same state; "unexplained" where they do (``near``) and nothing does.

        Empty for states that are apart, and may be.
        """
        if self.key(first, layer) == self.key(second, layer):
            return self.name(first, second, layer)
        return UNEXPLAINED if near else ""

    def _seen(self, ids: Ids, layer: Layer) -> tuple[int, ...]:
        """The tokens a state can depend on, equal ones under one name."""
        return tuple(self.same[token] for token in ids[-(self.reach[layer] or len(ids)) :])


def token_classes(model: LanguageModel, longest: int = 1) -> list[int]:
    """For every token the first one that enters block 1 as the same row to the bit, at every position.

    Not rows of the table: a projection after it may make two of them one, and a sum with a position's row
    may too. Tokens that agree at the first position are compared at all ``longest``.
    """
    tokens = torch.arange(model.vocab_size)
    entering = [model.states(some[:, None], (0,))[0][:, 0] for some in tokens.split(_TOKENS)]
    same = same_rows(torch.cat(entering)).cpu()
    twins = (same != tokens).nonzero().flatten()
    for some in twins.split(max(1, _TOKENS // longest)) if longest > 1 and len(twins) else ():
        here, there = (model.states(row[:, None].expand(-1, longest), (0,))[0] for row in (some, same[some]))
        apart = (here != there).flatten(1).any(dim=1).cpu()
        same[some[apart]] = some[apart]
    classes: list[int] = same.tolist()
    return classes


def measured_reach(model: LanguageModel, ids: Ids, layers: Sequence[Layer]) -> dict[Layer, int | None]:
    """How many of the last tokens of a prompt its last state depends on, by layer; None where on all.

    Found by replacing the tokens before: no bit of the state changes where none of them is seen. Each pass
    has one row, so that nothing else changes a bit either. Cost: two passes, and where there are windows
    about log2(length) more for each layer that has one.
    """
    prompt = torch.tensor(ids)
    other = (prompt + 1) % model.vocab_size
    above = [layer for layer in layers if layer != 0]
    plain = {layer: states[0, -1] for layer, states in model.states(prompt[None], above).items()}

    def unseen(cut: int, among: Sequence[Layer]) -> set[Layer]:
        changed = model.states(torch.cat([other[:cut], prompt[cut:]])[None], list(among))
        return {layer for layer in among if torch.equal(changed[layer][0, -1], plain[layer])}

    reach: dict[Layer, int | None] = dict.fromkeys(above)
    blind = unseen(1, above) if len(ids) > 1 and above else set()
    for layer in blind:
        low, high = 1, len(ids)  # the first `low` tokens are not seen, the first `high` are
        while high - low > 1:
            cut = (low + high) // 2
            low, high = (cut, high) if unseen(cut, [layer]) else (low, cut)
        reach[layer] = len(ids) - low
    return {0: 1, **reach}


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


def shortest_word(seen: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest word of which the tokens are a repetition."""
    for length in range(1, len(seen)):
        if len(seen) % length == 0 and seen[:length] * (len(seen) // length) == seen:
            return seen[:length]
    return seen
