"""One layer of a collision search: all pairs of the prompts' last states, and hard pairs beside them."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions.confirmation import ConfirmedStructure
from preimage.collisions.options import CollisionOptions
from preimage.collisions.result import ComparedPair, HardKind, LayerCollisions
from preimage.collisions.spacing import RowLabels, measure_spacing
from preimage.collisions.structure import UNEXPLAINED
from preimage.distances import EachTile, here, norms, row_distances
from preimage.errors import StatesError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.prompts import HardPair, PromptSet, hard_pairs
from preimage.states import States, noise_floor, safety


class LayerAudit:
    """All pairs of one set of prompts, a layer at a time, and hard pairs beside them."""

    def __init__(
        self, model: LanguageModel, ids: PromptSet, layers: Sequence[Layer], options: CollisionOptions
    ) -> None:
        self.model, self.ids, self.layers, self.options = model, ids, layers, options
        self._noise_floor = noise_floor(model, layers)
        self._hard = _hard_pairs(model, ids, options)
        self.hard_prompts = list(
            dict.fromkeys(ids for pair in self._hard for ids in (pair.first, pair.second))
        )
        self._hard_rows = {ids: row for row, ids in enumerate(self.hard_prompts)}
        self.structure = ConfirmedStructure(model, [*ids, *self.hard_prompts], layers)
        self._states: tuple[States, States | None] | None = None

    def use(self, states: States, hard: States | None) -> None:
        """The last states of the prompts, and of the hard ones."""
        self._states = states, hard

    def last(self, layer: Layer) -> Float[Tensor, "prompt d_model"]:
        """The last states of all prompts at a layer, where the model is."""
        assert self._states is not None
        states, _ = self._states
        last = states.last(layer)
        if not bool(torch.isfinite(last).all()):
            states.require_finite(layer)  # which says whose they are
        return last.to(self.model.device)

    def at(self, layer: Layer, each: EachTile = here) -> LayerCollisions:
        """All pairs at one layer; ``each`` runs the tiles of the screen."""
        assert self._states is not None
        ids, structure, hard = self.ids.ids, self.structure, self._states[1]
        labels = RowLabels(
            ids=lambda row: ids[row],
            text=lambda row: self.model.decode(ids[row]),
            key=lambda row: structure.key(ids[row], layer),
            explain=lambda a, b, near: structure.explain(ids[a], ids[b], layer, near=near),
        )
        spacing = measure_spacing(self.last(layer), self._noise_floor[layer], labels, self.options, each)
        kinds = () if hard is None else self._hard_kinds(hard, layer)
        return LayerCollisions(layer, spacing, kinds)

    def _hard_kinds(self, states: States, layer: Layer) -> tuple[HardKind, ...]:
        last = states.last(layer)
        for ids, row in self._hard_rows.items():
            if not bool(torch.isfinite(last[row]).all()):
                raise StatesError(
                    f"The hard prompt {reprlib.repr(ids)}, layer {layer}, holds NaN or infinity.",
                    "Set hard_bases to 0, or use float32 if a half-precision model overflowed.",
                )
        rows = [(self._hard_rows[pair.first], self._hard_rows[pair.second]) for pair in self._hard]
        first, second = (last[list(side)] for side in zip(*rows, strict=True))
        radii = safety(first.dtype) * self._noise_floor[layer] * torch.maximum(norms(first), norms(second))
        kinds: dict[str, list[ComparedPair]] = {}
        for pair, ends, distance, radius in zip(
            self._hard, rows, row_distances(first, second).tolist(), radii.tolist(), strict=True
        ):
            both = pair.first, pair.second
            texts = self.model.decode(pair.first), self.model.decode(pair.second)
            reason = self.structure.explain(*both, layer, near=distance <= radius)
            compared = ComparedPair(*ends, *both, *texts, distance, radius, reason)
            kinds.setdefault(pair.kind, []).append(compared)
        return tuple(_summary(kind, pairs) for kind, pairs in kinds.items())


def _summary(kind: str, pairs: list[ComparedPair]) -> HardKind:
    reasons = Counter(pair.explanation for pair in pairs if pair.explanation)
    return HardKind(
        kind=kind,
        pairs=len(pairs),
        closest_pair=min(pairs, key=lambda pair: pair.distance),
        margin=min((p.distance for p in pairs if p.explanation in ("", UNEXPLAINED)), default=None),
        within_noise=sum(pair.distance <= pair.noise_radius for pair in pairs),
        explained={reason: count for reason, count in sorted(reasons.items()) if reason != UNEXPLAINED},
        unexplained=reasons[UNEXPLAINED],
    )


def _hard_pairs(model: LanguageModel, ids: PromptSet, options: CollisionOptions) -> tuple[HardPair, ...]:
    if not options.hard_bases:
        return ()
    begin = getattr(model.tokenizer, "bos_token_id", None)
    everywhere = begin is not None and all(row[0] == begin for row in ids)
    return hard_pairs(
        ids,
        model.tokenizer,
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        bos=begin if everywhere else None,
        seed=options.seed,
        bases=options.hard_bases,
    )
