"""``distance_to_collision``: how far the parameters are from ones at which two prompts have the same state.

g(theta) = F^l_theta(s) - F^l_theta(s') vanishes on the pair's discriminant, and J = dg/dtheta. To first order
the nearest zero lies at sqrt(g^T (J J^T)^-1 g); Newton's steps -J^T (J J^T)^-1 g then lead to a true one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.errors import ModelError, OptionError, PromptError
from preimage.layers import parse_layer
from preimage.models import DoubleModel, LanguageModel, double_copy, require_model
from preimage.progress import Listener, Progress, reporting, silent
from preimage.states import encode_all
from preimage.theory.discriminant.movement import Movement
from preimage.theory.result import TheoryReport, Verdict

COLLISION = 1e-12  # relative to the states' norm: rounding of float64 through a whole model
_ROUNDING = 1e-15  # no step is taken to get below
_CUT = 1e-12  # eigenvalues of J J^T below this share of the largest are directions in which g cannot move
_OUTSIDE = 1e-3  # the share of g that may lie outside the range of J
_JACOBIANS = 20  # at most
_SERVES = 0.7  # J serves while a step leaves less of g than this share
_STALLED = 0.99  # a new J that leaves more of g than this share is the last
_SHORTEST = 1e-3  # fraction of a step that is tried
_ENOUGH = 0.3  # a fraction of a step has to take away this much of what it would if g were linear
Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True)
class _Approach:
    """Where Newton's steps led: a model of its own, and how they went."""

    model: DoubleModel
    parameters: int
    first_order: float  # infinite where no first-order step removes the difference
    norm: float  # of the parameters that may move
    distance: float  # from them to those reached
    before: float  # |g| by the larger state's norm
    after: float
    steps: list[dict[str, Any]]


def distance_to_collision(
    model: LanguageModel,
    first: Prompt,
    second: Prompt,
    layer: int | str = "final",
    *,
    learning_rate: float = 1e-3,
    only: str | None = None,
    bos: bool | None = None,
    progress: Listener = silent,
) -> TheoryReport:
    """How far the model is from one in which two prompts collide at a layer, to first order and truly.

    ``first``, ``second``: a text or token ids each. ``layer``: 0..L; at "final" two states collide where they
    do at L. ``learning_rate`` sets the yardstick: the norm eta sqrt(p) of AdamW's first step over p
    parameters. ``only``: a regular expression for the names of those that may move; all that matter by
    default. Runs on a float64 copy, float64 throughout; the model is not changed. Memory: the model twice in
    float64, and J with d_model rows.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> report = distance_to_collision(model, [1, 2], [3, 4], layer=1)
    >>> report.tables["distance"][0]["distance"] > 0, [verdict.id for verdict in report.refuted]
    (True, [])
    """
    require_model(model)
    ids, wanted = _pair(model, first, second, bos), _block(model, layer)
    if not learning_rate > 0:
        raise OptionError(f"learning_rate is {learning_rate}.", "Give a number above 0.")
    with reporting(progress) as report:
        approach = _approach(model, ids, wanted, only, report)
    layers = _layers_below(model, approach.model, ids, wanted)
    step = learning_rate * math.sqrt(approach.parameters)
    subject = {
        "model": model.identity.to_dict(),
        "first": list(ids[0]),
        "second": list(ids[1]),
        "layer": wanted,
        "only": only,
        "parameters": approach.parameters,
        "learning_rate": learning_rate,
    }
    numbers = {
        "first_order": approach.first_order,
        "distance": approach.distance,
        "relative": approach.distance / approach.norm,
        "parameter_norm": approach.norm,
        "optimiser_step": step,
        "optimiser_steps": approach.distance / step,
        "residual_before": approach.before,
        "residual_after": approach.after,
    }
    merged = _merged(approach.model, ids)
    tables = {"distance": [numbers], "newton": approach.steps, "layers": layers, "merged": merged}
    return TheoryReport("discriminant", subject, _verdicts(approach, layers, merged, step), tables)


def build_collision(
    model: LanguageModel,
    first: Prompt,
    second: Prompt,
    layer: int | str = "final",
    *,
    only: str | None = None,
    bos: bool | None = None,
    progress: Listener = silent,
) -> DoubleModel:
    """A float64 copy of a model, its parameters moved so that two prompts collide at a layer.

    The collision is one of the map in float64 throughout, which the copy runs; its module by itself, where
    the class computes norms in float32, shows it to the rounding of float32. Arguments and cost are those of
    :func:`distance_to_collision`; a ModelError says that no collision was reached.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> moved = build_collision(model, [1, 2], [3, 4], layer=1)
    >>> first, second = moved.states(torch.tensor([[1, 2], [3, 4]]), (1,))[1][:, -1]
    >>> torch.allclose(first, second, rtol=0, atol=1e-12)
    True
    """
    require_model(model)
    ids, wanted = _pair(model, first, second, bos), _block(model, layer)
    with reporting(progress) as report:
        approach = _approach(model, ids, wanted, only, report)
    if approach.after > COLLISION:
        raise ModelError(
            f"No collision at layer {wanted} was reached: {approach.after:.1e} of the norm is left.",
            "Give other prompts, another layer, or let more parameters move.",
        )
    return approach.model


def _block(model: LanguageModel, layer: int | str) -> int:
    """The layer in question; "final" is L, because the last norm sends equal states to equal states.

    The other way round its eps keeps states apart that differ in length alone, so little that no float64 step
    would find the way.
    """
    wanted = parse_layer(layer, model.n_layers)
    return model.n_layers if wanted == "final" else wanted


def _pair(
    model: LanguageModel, first: Prompt, second: Prompt, bos: bool | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    one, other = encode_all(model, [first, second], bos)
    if one == other:
        raise PromptError("The two prompts are the same.", "Give two that differ.")
    return one, other


def _approach(
    model: LanguageModel,
    ids: tuple[tuple[int, ...], tuple[int, ...]],
    layer: int,
    only: str | None,
    progress: Progress,
) -> _Approach:
    """Newton's steps on a copy, with one J for as many of them as it serves."""
    moved = double_copy(model, head=True)
    rows: list[dict[str, Any]] = []
    first_order = before = after = 0.0
    names: tuple[str, ...] = ()
    for attempt in range(_JACOBIANS + 1):
        movement = Movement(moved, *ids, layer, only)
        try:
            with torch.no_grad():
                value = movement.difference()
            previous, after = after, float(norms(value)) / movement.state_norm
            if attempt == 0:
                before, names = after, movement.names
            if attempt == _JACOBIANS or after <= COLLISION / 10 or (attempt and after > _STALLED * previous):
                break
            shortest = _Shortest(movement.jacobian())
            if attempt == 0:
                first_order = shortest.distance(value)
            move = _steps(movement, shortest, value, rows, progress)
        finally:
            movement.close()
        movement.apply(move)
    reached = DoubleModel(moved.module, moved.tokenizer, name=moved.name, revision=moved.revision)
    one, other = (dict(each.anatomy.backbone.named_parameters()) for each in (model, reached))
    gaps = [float(row_distances(one[name].detach().flatten(), other[name].flatten())) for name in names]
    return _Approach(
        model=reached,
        parameters=sum(one[name].numel() for name in names),
        first_order=first_order,
        norm=math.hypot(*(float(norms(one[name].detach().flatten())) for name in names)),
        distance=math.hypot(*gaps),
        before=before,
        after=after,
        steps=rows,
    )


class _Shortest:
    """The shortest move that removes a difference to first order, by the eigenvectors of J J^T."""

    def __init__(self, jacobian: Float[Tensor, "d m"]) -> None:
        self._jacobian = jacobian
        squares, vectors = torch.linalg.eigh(jacobian @ jacobian.mT)
        kept = squares > _CUT * squares[-1].clamp_min(torch.finfo(squares.dtype).tiny)
        self._squares, self._vectors = squares[kept], vectors[:, kept]
        self.rank = int(kept.sum())

    def step(self, value: Float[Tensor, " d"]) -> Float[Tensor, " m"]:
        """-J^T (J J^T)^-1 g."""
        weights: Tensor = self._vectors @ (self._vectors.mT @ value / self._squares)
        return -(self._jacobian.mT @ weights)

    def distance(self, value: Float[Tensor, " d"]) -> float:
        """sqrt(g^T (J J^T)^-1 g), infinite where part of g lies outside the range of J."""
        inside = self._vectors.mT @ value
        if float(norms(value - self._vectors @ inside)) > _OUTSIDE * float(norms(value)):
            return math.inf
        return float(norms(inside / self._squares.sqrt()))


def _steps(
    movement: Movement,
    shortest: _Shortest,
    value: Float[Tensor, " d"],
    rows: list[dict[str, Any]],
    progress: Progress,
) -> Float[Tensor, " m"]:
    """Steps with one J until g is at rounding level or J serves no longer; the move they add up to."""
    move = torch.zeros(movement.size, dtype=value.dtype, device=value.device)
    size, share = float(norms(value)), 0.0  # |g|, and what the last step left of it
    while share < _SERVES and size > _ROUNDING * movement.state_norm:
        step, new = shortest.step(value), share == 0
        fraction, value = _fraction(movement, move, step, size, halve=new)
        left = float(norms(value))
        if left >= size:
            break
        move, share, size = move + fraction * step, left / size, left
        residual = size / movement.state_norm
        length = fraction * float(norms(step))
        rows.append({"step": len(rows) + 1, "rank": shortest.rank, "residual": residual, "length": length})
        progress(len(rows), 0, f"Newton steps, {residual:.1e} of the norm left")
    return move


def _fraction(
    movement: Movement, move: Float[Tensor, " m"], step: Float[Tensor, " m"], size: float, *, halve: bool
) -> tuple[float, Float[Tensor, " d"]]:
    """How much of a step to take, and g after it. ``halve``: until it helps enough, as a new J's must."""
    fraction = 1.0
    while True:
        with torch.no_grad():
            value = movement.difference(move + fraction * step)
        helps = float(norms(value)) < (1 - _ENOUGH * fraction) * size
        if helps or not halve or fraction < _SHORTEST:
            return fraction, value
        fraction /= 2


def _layers_below(
    model: LanguageModel, moved: DoubleModel, ids: Sequence[Sequence[int]], layer: int
) -> list[dict[str, Any]]:
    """The pair's distance at the layer and at every one below, by the norm, before and after."""
    layers = tuple(range(layer + 1))
    distances: list[dict[int, float]] = []
    for each in (double_copy(model), moved):
        first, second = (each.states(torch.tensor([prompt]), layers) for prompt in ids)
        last = {k: torch.stack([first[k][0, -1], second[k][0, -1]]) for k in layers}
        distances.append({k: float(row_distances(*pair) / norms(pair).max()) for k, pair in last.items()})
    return [{"layer": k, "before": distances[0][k], "after": distances[1][k]} for k in layers]


def _merged(model: LanguageModel, ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Tokens of the two prompts whose embeddings are the same at the parameters reached."""
    tokens = sorted({token for prompt in ids for token in prompt})
    rows = model.embedding_table[tokens].double()
    lengths = norms(rows).clamp_min(torch.finfo(rows.dtype).tiny)
    merged = []
    for first, second in combinations(range(len(tokens)), 2):
        longer = torch.maximum(lengths[first], lengths[second])
        away = float(row_distances(rows[first], rows[second]) / longer)
        if away <= COLLISION:
            merged.append({"first": tokens[first], "second": tokens[second], "distance": away})
    return merged


def _verdicts(
    approach: _Approach, layers: Sequence[dict[str, Any]], merged: Sequence[dict[str, Any]], step: float
) -> tuple[Verdict, ...]:
    """What the theory allows either way is descriptive: equal embeddings are a collision like any other."""
    reached = approach.after <= COLLISION
    told = [row["after"] for row in layers[:-1] if row["before"] > COLLISION]
    above = "Layers above this one, which a collision may reach."
    if merged:
        pairs = " and ".join(f"{row['first']} = {row['second']}" for row in merged)
        above += f" This collision makes embeddings equal, of tokens {pairs}: a legitimate one."
    apart, others = "The two prompts are apart at this layer.", "Other pairs of prompts."
    newton = "Newton's steps reach parameters at which the two prompts collide at this layer."
    nearer = "That no collision is nearer: the distance reached is an upper bound."
    none = "Not reached is not that there is none."
    earlier = "Every earlier layer that told the two prompts apart still does there."
    beyond = "The collision reached is farther away than one AdamW step moves the parameters."
    training = (
        "That training would go there: a step's direction is the loss's, and the collisions of one pair"
        " have as many codimensions as the state has numbers."
    )
    nearest, distance = min(told, default=None), approach.distance if reached else None
    still = None if nearest is None else nearest > COLLISION
    far = None if distance is None else distance > step
    before, after = approach.before, approach.after
    return (
        Verdict("discriminant.apart", apart, before > COLLISION, before, COLLISION, others),
        Verdict("discriminant.reached", newton, reached, after, COLLISION, f"{nearer} {none}"),
        Verdict("discriminant.earlier_layers_apart", earlier, still, nearest, COLLISION, above, True),
        Verdict("discriminant.beyond_a_step", beyond, far, distance, step, training, True),
    )
