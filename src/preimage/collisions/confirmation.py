"""Structure that is confirmed, not assumed.

``structure`` says which prompts may have to collide. Here each of them is run at random float64 parameters
of the very module, hooks and replaced parts included: only prompts that no draw tells apart are the same for
structural reasons. An attention sink, a recurrent part, a hook that knows positions or a table of positions
separates them, and then what the given weights put within noise is a collision of these weights, which
nothing excuses.

Where there are more such prompts than may be run, the shortest and the longest of each class come first, and
the rest is believed only as far as every one of its family that was run confirms it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preimage.collisions.rounding import last_states, most_terms, rounding_bounds
from preimage.collisions.structure import UNEXPLAINED, Structure, measured_reach
from preimage.devices import by_device
from preimage.distances import norms, row_distances
from preimage.layers import Layer
from preimage.models import LanguageModel, draw_by_block, release

log = logging.getLogger(__name__)

_DRAWS = 2
_TOKENS = {"cpu": 1024, "cuda": 2**14}  # positions through the blocks of one draw; all hard pairs fit
_TOKENS_BELOW = 2**16  # positions that go no farther than layer 0
_PROMPTS = 512  # whose states at all layers are held at once
_CONDITION = 8  # prompts that tell how errors grow
Ids = tuple[int, ...]
Classes = dict[Layer, list[list[Ids]]]
Labels = dict[Layer, dict[Ids, Hashable]]


class ConfirmedStructure:
    """What a model cannot tell apart among the prompts of one search, whatever its weights.

    Nothing is drawn before the first question about a layer at which prompts may have to collide; then two
    draws decide all layers at once. Cost: see ``draw_by_block``, and two passes over these prompts a draw.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Iterable[Sequence[int]],
        layers: Sequence[Layer],
        structure: Structure | None = None,
    ) -> None:
        self._model = model
        self._prompts = tuple(dict.fromkeys(map(tuple, prompts)))
        self._given = structure
        self._parts = ([layer for layer in layers if layer == 0], [layer for layer in layers if layer != 0])
        self._labels: Labels = {}

    @cached_property
    def _structure(self) -> Structure:
        if self._given is not None:
            return self._given
        longest = max(self._prompts, key=len)
        layers = [1, *(layer for part in self._parts for layer in part if layer != 1)]
        return Structure(self._model, len(longest), measured_reach(self._model, longest, layers))

    def told(self) -> dict[str, Any]:
        """All that the draws say, in plain json types, for :meth:`believe`: a number for equal labels."""
        number = {ids: index for index, ids in enumerate(self._prompts)}
        labels: dict[str, list[list[int]]] = {}
        for layer in chain.from_iterable(self._parts):
            self.key(self._prompts[0], layer)
            classes: dict[Hashable, int] = {None: -1}
            labels[str(layer)] = [
                [number[ids], classes.setdefault(label, len(classes))]
                for ids, label in self._labels[layer].items()
                if label is not None
            ]
        reach = {str(layer): sees for layer, sees in self._structure.reach.items()}
        return {"reach": reach, "labels": labels}

    def believe(self, told: dict[str, Any]) -> None:
        """Take what somebody else was told by the draws, of the same prompts in the same order."""
        longest = max(map(len, self._prompts))
        reach = {_layer(name): sees for name, sees in told["reach"].items()}
        self._given = Structure(self._model, longest, reach)
        for name, labels in told["labels"].items():
            self._labels[_layer(name)] = {self._prompts[index]: label for index, label in labels}

    def key(self, ids: Sequence[int], layer: Layer) -> Hashable:
        """Prompts with equal keys have the same state at the layer, for all parameters."""
        if layer not in self._labels:
            self._labels |= self._show(next(part for part in self._parts if layer in part))
        return self._structure.key(ids, layer), self._labels[layer].get(tuple(ids))

    def explain(self, first: Sequence[int], second: Sequence[int], layer: Layer, *, near: bool) -> str:
        """Why two prompts have the same state, "unexplained" where they do (``near``) and nothing says why.

        Empty for states that are apart, and may be.
        """
        if self.key(first, layer) == self.key(second, layer):
            return self._structure.name(first, second, layer)
        return UNEXPLAINED if near else ""

    def _show(self, layers: Sequence[Layer]) -> Labels:
        """For every prompt that may have to collide with another what the draws say: equal labels, equal."""
        classes = {layer: self._classes(layer) for layer in layers}
        chosen = self._affordable(classes)
        labels: dict[Layer, dict[Ids, tuple[int, ...]]] = {layer: {} for layer in layers}
        if chosen:
            try:
                for seed in range(_DRAWS):
                    self._draw(seed, chosen, classes, labels)
            except Exception as error:  # a module that cannot be drawn confirms nothing, and says so
                log.warning("no structural collision is claimed: %s", error)
                return {layer: {ids: ids for group in classes[layer] for ids in group} for layer in layers}
        return {layer: self._all_labels(layer, classes[layer], labels[layer]) for layer in layers}

    def _classes(self, layer: Layer) -> list[list[Ids]]:
        """Prompts that may have to collide: the shortest first, then the longest, then the others."""
        groups: dict[Hashable, list[Ids]] = {}
        for ids in self._prompts:
            groups.setdefault(self._structure.key(ids, layer), []).append(ids)
        shared = [sorted(group, key=len) for group in groups.values() if len(group) > 1]
        return [[group[0], group[-1], *group[1:-1]] for group in shared]

    def _affordable(self, classes: Classes) -> list[Ids]:
        """Which of them to run, the first of every class before the second of any."""
        ranks: dict[Ids, int] = {}
        for group in chain.from_iterable(classes.values()):
            for rank, ids in enumerate(group):
                ranks[ids] = min(rank, ranks.get(ids, rank))
        at_0 = list(classes) == [0]
        left = _TOKENS_BELOW if at_0 else by_device(_TOKENS, self._model.device)
        most = _TOKENS_BELOW if at_0 else _PROMPTS
        chosen: list[Ids] = []
        for ids in sorted(ranks, key=lambda ids: ranks[ids]):
            if len(ids) <= left and len(chosen) < most:
                chosen.append(ids)
                left -= len(ids)
        return chosen

    def _draw(
        self, seed: int, chosen: list[Ids], classes: Classes, labels: dict[Layer, dict[Ids, tuple[int, ...]]]
    ) -> None:
        """Add to the labels what one draw says."""
        layers = [layer for layer, groups in classes.items() if groups]
        drawn = draw_by_block(self._model, seed)
        terms = most_terms(self._model, chosen)
        some = chosen[:_CONDITION]

        def rename(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            """Tokens that are one to the model's embedding are one to the copy's, not to its other parts."""
            return (same[args[0]], *args[1:])

        try:
            same = torch.tensor(self._structure.same, device=drawn.device)
            with drawn.anatomy.embedding.register_forward_pre_hook(rename):
                last = last_states(drawn, chosen, layers)
                bounds = rounding_bounds(drawn, some, {at: last[at][: len(some)] for at in last}, terms)
        finally:
            release(drawn)
        place = {ids: row for row, ids in enumerate(chosen)}
        for layer in layers:
            for group in classes[layer]:
                run = [ids for ids in group if ids in place]
                states = last[layer][[place[ids] for ids in run]]
                for ids, number in zip(run, _clusters(states, bounds[layer]), strict=True):
                    labels[layer][ids] = (*labels[layer].get(ids, ()), number)

    def _all_labels(
        self, layer: Layer, groups: list[list[Ids]], run: dict[Ids, tuple[int, ...]]
    ) -> dict[Ids, Hashable]:
        """The labels of the prompts that were run, and of those that follow from them."""
        pairs = [(group[0], ids) for group in groups for ids in group[1:]]
        answers: dict[str, set[bool]] = {}
        for first, ids in pairs:
            if ids in run:
                family = self._structure.name(first, ids, layer)
                answers.setdefault(family, set()).add(run[ids] == run[first])
        labels: dict[Ids, Hashable] = dict(run)
        for first, ids in pairs:
            if ids not in run:
                shown = answers.get(self._structure.name(first, ids, layer)) == {True}
                labels[ids] = run.get(first) if shown else ids
        return labels


def _layer(name: str) -> Layer:
    return "final" if name == "final" else int(name)


def _clusters(states: Float[Tensor, "prompt d_model"], bound: float) -> list[int]:
    """States that rounding alone may have put apart share a number."""
    firsts: list[int] = []
    numbers = []
    sizes = norms(states)
    for row, state in enumerate(states):
        near = row_distances(state[None], states[firsts]) <= bound * (sizes[row] + sizes[firsts])
        number = int(near.nonzero()[0]) if bool(near.any()) else len(firsts)
        if number == len(firsts):
            firsts.append(row)
        numbers.append(number)
    return numbers
