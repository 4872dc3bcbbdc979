"""Symmetries: other weights, the same states, and so the same margins and the same collisions.

The discriminant and everything measured from distances of states belong to the orbit of a model under the
symmetry group of its architecture, not to the weights alone. Elements of the group are drawn and applied to
float64 copies; the model that is given is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from preimage.distances import PromptDistances, norms, row_distances
from preimage.errors import OptionError, PromptError
from preimage.layers import Layer, all_layers
from preimage.models import DoubleModel, LanguageModel, double_copy
from preimage.progress import Listener, reporting, silent
from preimage.prompts import PromptSet
from preimage.states import encode_all, group_by_length
from preimage.theory.result import TheoryReport, Verdict
from preimage.theory.symmetry.group import Transform, group_of
from preimage.theory.symmetry.weights import read_weights

_PAIRS = "Over pairs of the given prompts that do not collide, at their last positions."


class _Pairs(NamedTuple):
    """Of one layer's last states. Pairs that collide, up to rounding, have no part in margin and ratio."""

    margin: float | None
    colipschitz: float | None
    colliding: Bool[Tensor, "prompt prompt"]


class _Comparison(NamedTuple):
    """One transform at one layer, against the model as it was."""

    transform: Transform
    layer: Layer
    error: float
    before: _Pairs
    after: _Pairs


def check_symmetry(
    model: LanguageModel,
    prompts: str | Sequence[str | Sequence[int]] | Sequence[int] | PromptSet,
    *,
    seed: int = 0,
    tolerance: float = 1e-12,
    distance_tolerance: float = 1e-10,
    apart: float = 1e-3,
    transforms: Sequence[Transform] | None = None,
    progress: Listener = silent,
) -> TheoryReport:
    """Draw from the symmetry group of a model's architecture and see what stays.

    ``prompts``: two or more, all different. ``tolerance`` bounds the relative error |F - F'| / |F| of every
    state, and how near two states count as one; ``distance_tolerance`` bounds the relative change of margins
    and co-Lipschitz constants; what is no symmetry must move some state by ``apart`` or more.
    ``transforms``: others than the architecture's own.
    Cost: two float64 copies of the weights, and one pass over the prompts for each transform.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> check_symmetry(model, [[1, 2, 3], [4, 5]]).refuted
    ()
    """
    if not 0 < tolerance < apart or distance_tolerance <= 0:
        given = f"tolerance {tolerance}, distance_tolerance {distance_tolerance}, apart {apart}"
        raise OptionError(f"{given} decide nothing.", "Give 0 < tolerance < apart, all above 0.")
    ids = encode_all(model, prompts)
    if len(set(ids)) < max(len(ids), 2):
        raise PromptError("Symmetries need two prompts or more, all different.", "Give every prompt once.")
    start = _Start(double_copy(model), ids, tolerance)
    known, missing = group_of(start.weights)
    chosen = tuple(known if transforms is None else transforms)
    comparisons: list[_Comparison] = []
    with reporting(progress) as report:
        for done, transform in enumerate(chosen):
            report(done, len(chosen), f"transforms, now {transform.name}")
            compared = start.compare(transform, Generator().manual_seed(seed))
            if not compared:
                missing += (
                    f"{transform.name}: the draw changed no weight, as one head or gains of 1 make it",
                )
            comparisons += compared
        report(len(chosen), len(chosen), "transforms")
    if not comparisons:
        raise OptionError("None of these transforms changes a weight.", "Leave transforms out.")
    acted = dict.fromkeys(one.transform for one in comparisons)
    verdicts = [_stays(transform, comparisons, seed, tolerance, apart) for transform in acted]
    symmetric = [one for one in comparisons if one.transform.symmetry]
    if symmetric:
        verdicts += _descend(symmetric, distance_tolerance)
    subject = {"model": model.identity.to_dict(), **start.facts(), "seed": seed}
    subject |= {"arithmetic": "float64 throughout, on copies", "not_sampled": list(missing)}
    return TheoryReport("symmetry", subject, tuple(verdicts), {"layers": [_row(one) for one in comparisons]})


class _Start:
    """The model as it is, at every layer, to be compared with copies that a transform acted on."""

    def __init__(self, model: DoubleModel, ids: Sequence[tuple[int, ...]], tolerance: float) -> None:
        self._model, self._ids, self._tolerance = model, ids, tolerance
        self.weights = read_weights(model)
        self._states = _states(model, ids)
        every = torch.arange(len(ids))
        self._between = PromptDistances(ids)
        table = self._between.of(every.repeat_interleave(len(ids)), every.repeat(len(ids)))
        self._table = table.view(len(ids), -1)
        self._pairs = {layer: self._measure(rows) for layer, rows in self._states.items()}

    def compare(self, transform: Transform, random: Generator) -> list[_Comparison]:
        """What one drawn element does to every layer it speaks of; empty where it changes no weight."""
        copy = double_copy(self._model)
        turn = transform.act(read_weights(copy), random)
        if _same_weights(self._model, copy):
            return []
        comparisons = []
        for layer, rows in _states(copy, self._ids).items():
            if layer != "final" or transform.final:
                before = self._states[layer]
                error = _error(rows, before if turn is None else before @ turn.to("cpu"))
                pairs = self._pairs[layer], self._measure(rows)
                comparisons.append(_Comparison(transform, layer, error, *pairs))
        return comparisons

    def facts(self) -> dict[str, Any]:
        """What of the prompts and the architecture stands in the report."""
        block = self.weights.blocks[0]
        return {
            "prompts": len(self._ids),
            "prompt_distance": self._between.name,
            "positions": "absolute" if self.weights.planes is None else "rotary",
            "heads": len(block.query.weight),
            "groups": len(block.key.weight),
        }

    def _measure(self, rows: Float[Tensor, "row d"]) -> _Pairs:
        """All pairs of last states."""
        last = rows[torch.tensor([len(row) for row in self._ids]).cumsum(0) - 1]
        lengths = norms(last)
        distances = torch.stack([row_distances(row, last) for row in last])
        colliding = distances <= self._tolerance * torch.maximum(lengths[:, None], lengths)
        if bool(colliding.all()):
            return _Pairs(None, None, colliding)
        ratios = distances / self._table.clamp_min(1)
        return _Pairs(float(distances[~colliding].min()), float(ratios[~colliding].min()), colliding)


def _states(model: DoubleModel, ids: Sequence[Sequence[int]]) -> dict[Layer, Float[Tensor, "row d"]]:
    """States of every position of every prompt, one prompt after another; equally long ones run together."""
    layers = all_layers(model.n_layers)
    rows = {layer: [torch.empty(0)] * len(ids) for layer in layers}
    for group in group_by_length([len(row) for row in ids]):
        for layer, states in model.states(torch.tensor([ids[i] for i in group.prompts]), layers).items():
            for prompt, state in zip(group.prompts, states.cpu(), strict=True):
                rows[layer][prompt] = state
    return {layer: torch.cat(states) for layer, states in rows.items()}


def _same_weights(one: DoubleModel, other: DoubleModel) -> bool:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def _error(rows: Float[Tensor, "row d"], expected: Float[Tensor, "row d"]) -> float:
    """The largest |F - F'| / |F|; a state of length 0, such as a padding token's, has to stay 0."""
    scale = norms(expected).clamp_min(torch.finfo(torch.float64).tiny)
    return _finite(float((row_distances(rows, expected) / scale).max()))


def _stays(
    transform: Transform, comparisons: Sequence[_Comparison], seed: int, tolerance: float, apart: float
) -> Verdict:
    """A symmetry must stay within rounding, what is none must move a state far; between is undecided."""
    error = max(one.error for one in comparisons if one.transform is transform)
    name = f"symmetry.{transform.name.replace(' ', '_')}"
    drawn = f"One element was drawn, with seed {seed}; logits are not looked at."
    if transform.symmetry:
        return Verdict(name, transform.statement, error <= tolerance, error, tolerance, drawn)
    holds = True if error >= apart else (False if error <= tolerance else None)
    special = "Special elements of it may be symmetries."
    return Verdict(name, transform.statement, holds, error, apart, special)


def _descend(comparisons: Sequence[_Comparison], tolerance: float) -> list[Verdict]:
    """What is measured from distances stays where the states do."""
    margin = max(_change(one.before.margin, one.after.margin) for one in comparisons)
    ratio = max(_change(one.before.colipschitz, one.after.colipschitz) for one in comparisons)
    moved = sum(int((one.before.colliding != one.after.colliding).sum()) // 2 for one in comparisons)
    inside = {one.layer: _count(one.before) > 0 for one in comparisons}
    seen = "No pair of these prompts collides at any layer, so that only staying outside was seen."
    if any(inside.values()):
        seen = f"Some pairs of these prompts collide, at {sum(inside.values())} of {len(inside)} layers."
    margins = "Separation margins are the same on the orbit"
    ratios = "Co-Lipschitz constants are the same on the orbit"
    discriminant = "No pair of prompts enters or leaves the discriminant along the orbit"
    return [
        Verdict("symmetry.margins", margins, margin <= tolerance, margin, tolerance, _PAIRS),
        Verdict("symmetry.colipschitz", ratios, ratio <= tolerance, ratio, tolerance, _PAIRS),
        Verdict("symmetry.discriminant", discriminant, moved == 0, float(moved), 0.0, seen),
    ]


def _change(before: float | None, after: float | None) -> float:
    if before is None or after is None:
        return 0.0 if before == after else math.inf
    return _finite(abs(after - before) / before)


def _finite(value: float) -> float:
    """NaN as infinity: ``max`` would lose it, and with it what went wrong."""
    return value if math.isfinite(value) else math.inf


def _count(pairs: _Pairs) -> int:
    return (int(pairs.colliding.sum()) - len(pairs.colliding)) // 2


def _row(one: _Comparison) -> dict[str, Any]:
    return {
        "transform": one.transform.name,
        "symmetry": one.transform.symmetry,
        "layer": str(one.layer),
        "error": one.error,
        "margin": one.before.margin,
        "margin_after": one.after.margin,
        "colipschitz": one.before.colipschitz,
        "colipschitz_after": one.after.colipschitz,
        "collisions": _count(one.before),
        "collisions_after": _count(one.after),
    }
