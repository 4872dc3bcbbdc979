"""``preimage.measure_geometry``: how far from a collision a set of states is, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions import find_collisions
from preimage.distances import equal_row_groups, same_rows
from preimage.distances.prompt_distances import PromptDistances
from preimage.errors import OptionError, PromptError, StatesError
from preimage.geometry.layer import measure_layer, measure_subsets
from preimage.geometry.options import GeometryChanges, GeometryOptions
from preimage.geometry.propagating import Stored, propagate
from preimage.geometry.result import Geometry, LayerGeometry, LayerSet, StepReport
from preimage.layers import Layer
from preimage.models import LanguageModel, require_model
from preimage.progress import Listener, Progress, reporting, silent
from preimage.prompts import PromptSet
from preimage.states import States
from preimage.storage import Errand, Run

_NOT_ZERO = 1e-300  # divides in place of 0


def measure_geometry(
    states: States,
    bits: Sequence[int | None] | None = None,
    *,
    options: GeometryOptions | None = None,
    model: LanguageModel | None = None,
    device: str | torch.device = "cpu",
    out: str | Path | None = None,
    progress: Listener = silent,
    **changes: Unpack[GeometryChanges],
) -> Geometry:
    """The diagnostics of arXiv 2511.14808 on the last states of every prompt, at every layer kept.

    All pairs are compared, exactly: a layer costs about the product of its states with themselves, once for
    every precision, and the subsets a fifth of that.

    ``states``: of at least two prompts, all different, with their token ids: co-Lipschitz constants divide by
    the prompts' distance. ``bits``: of quantised states, None for full precision, which is always measured.
    ``options``: everything else that can be chosen; ``bits`` and ``changes``, which are fields of it, go
    before. ``model``: the one that made the states; ``propagate`` carries quantised states on through it, and
    collisions in full precision are explained by it. ``device``: where distances are computed. ``out``: a run
    folder. Every layer is kept there as it ends, and calling again continues.

    >>> import preimage
    >>> from preimage.models.scratch import new_model
    >>> model = new_model("llama", "tiny", vocabulary=50, max_length=8, device="cpu")
    >>> states = preimage.capture(model, [[1, 2, 3], [4, 5, 6], [1, 2, 6]], positions="last")
    >>> shape = measure_geometry(states, bits=(None, 8), subsets=0)
    >>> shape.layers[2].pairs, shape.layers[2].margin > 0, shape.quantised[8].layers[2].collisions
    (3, True, 0)
    """
    chosen = replace(options or GeometryOptions(), **changes)
    if bits is not None:
        chosen = replace(chosen, bits=tuple(bits))
    if not isinstance(states, States):
        raise StatesError(
            f"A {type(states).__name__} is measured together with its prompts.",
            "Give what preimage.capture(model, prompts, positions='last') returns.",
        )
    if model is not None:
        require_model(model)
    if states.token_ids is None:
        raise OptionError("The token ids of these states were withheld.", "Capture them with their ids.")
    if states.observation.place != "residual":
        raise OptionError(
            f"These states are {states.observation.place}.", "Measure those of the residual stream."
        )
    if len(states) < 2:
        raise PromptError(f"{len(states)} prompts make no pair.", "Give at least two.")
    if len(set(states.token_ids)) < len(states):
        raise PromptError("Some of these prompts are the same.", "Capture every prompt once.")
    if chosen.propagate and model is None:
        raise OptionError("propagate needs the model that made the states.", "Give model as well.")
    if model is not None:
        states.require_made_by(model)
    run = Run(plan_of(states.model, states.token_ids, states.layers, chosen), out)
    with reporting(progress) as report:
        return measure_states(MeasuredLayers(states, chosen, device, model, report), run)


@dataclass(frozen=True)
class Precision:
    """A layer in so many bits, None in full."""

    bits: int | None
    geometry: LayerGeometry


@dataclass(frozen=True)
class MeasuredLayer:
    """What a run keeps of a layer: every precision of it."""

    precisions: list[Precision]


def measure_states(layers: MeasuredLayers, run: Run, remove: Sequence[str] = ()) -> Geometry:
    """Every layer that the run has not kept yet; what is named in ``remove`` leaves its folder at the end."""
    wanted = layers.states.layers
    kept = run.each(
        wanted, MeasuredLayer, lambda some: map(layers.at, some), layers.progress, "layers measured",
        errand=layers.elsewhere,
    )  # fmt: skip
    measured = {layer: {one.bits: one.geometry for one in item.precisions} for layer, item in kept.items()}
    prompts = layers.prompts
    result = Geometry(
        prompts=len(layers.states),
        prompt_distance=prompts.name,
        options=layers.options.to_dict(),
        layers={layer: measured[layer][None] for layer in wanted},
        quantised={
            bits: LayerSet({layer: measured[layer][bits] for layer in wanted})
            for bits in layers.options.bits
            if bits is not None
        },
        length=prompts.largest if prompts.name == "hamming" else None,
        source=layers.states.prompts["source"] if layers.states.prompts else None,
    )
    run.finish(result.to_dict, {"layers": result.rows}, remove)
    return result


def plan_of(
    model: dict[str, Any] | None,
    ids: Sequence[Sequence[int]],
    layers: Sequence[Layer],
    options: GeometryOptions,
) -> dict[str, Any]:
    """What makes a measurement the same one, for its run folder."""
    return {
        "command": "geometry",
        "model": model,
        "prompts": PromptSet(tuple(tuple(row) for row in ids), "list", 0, 0).fingerprint,
        "layers": list(layers),
        "options": options.to_dict(),
    }


class MeasuredLayers:
    """One measurement under way: layer by layer, full precision and every number of bits."""

    def __init__(
        self,
        states: States,
        options: GeometryOptions,
        device: str | torch.device,
        model: LanguageModel | None,
        progress: Progress = silent,
        elsewhere: Errand | None = None,
    ) -> None:
        assert states.token_ids is not None
        self.states, self.options, self._device, self._model = states, options, device, model
        self.progress, self._ids, self.elsewhere = progress, states.token_ids, elsewhere
        self.prompts = PromptDistances(states.token_ids, device)
        self._carried: dict[int, dict[Layer, Stored]] = {}

    def at(self, layer: Layer) -> MeasuredLayer:
        """What one layer shows."""
        return MeasuredLayer([Precision(bits, one) for bits, one in self._precisions(layer).items()])

    def _precisions(self, layer: Layer) -> dict[int | None, LayerGeometry]:
        self.states.require_finite(layer)
        x = self.states.last(layer).to(self._device)
        subsets = measure_subsets(x, self.prompts, self.options)
        full = measure_layer(layer, x, self.prompts, self.options, subsets=subsets)
        if full.collisions:
            full = replace(full, unexplained=self._unexplained(layer, x))
        precisions: dict[int | None, LayerGeometry] = {None: full}
        for bits in self.options.bits:
            if bits is None:
                continue
            grid, codes, mean = self._stored(layer, x, bits)
            values, step = grid.decode(codes), float(grid.step.max())
            report = StepReport(
                bits=bits,
                step=step,
                relative_step=step / max(mean, _NOT_ZERO),
                occupancy=float((codes != grid.zero.to(codes.dtype)).double().mean()),
                certified=None if self.options.propagate else grid.certifies(full.margin, x, values),
            )
            same = same_rows((codes if grid.shared else values).double())
            precisions[bits] = measure_layer(layer, values, self.prompts, self.options, same, report)
        return precisions

    def _unexplained(self, layer: Layer, x: Float[Tensor, "row d"]) -> int:
        """How many pairs of equal states no structure explains, by the search for collisions itself."""
        groups = [[self._ids[row] for row in rows] for rows in equal_row_groups(same_rows(x)).values()]
        if layer == 0:  # equal there by the same last token, at the same place
            groups = [group for group in groups if len({row[-1] for row in group}) > 1]
        if self._model is None or not groups:
            return sum(len(group) * (len(group) - 1) // 2 for group in groups)
        prompts = [row for group in groups for row in group]
        return find_collisions(self._model, prompts, [layer], hard_bases=0).unexplained

    def _stored(self, layer: Layer, x: Float[Tensor, "row d"], bits: int) -> Stored:
        quantiser = replace(self.options.quantiser, bits=bits)
        if not self.options.propagate:
            grid = quantiser.fit(x)
            return Stored(grid, grid.encode(x), float(x.double().abs().mean()))
        if bits not in self._carried:
            assert self._model is not None
            layers = self.states.layers
            self._carried[bits] = propagate(self._model, self._ids, quantiser, layers, self.progress)
        return self._carried[bits][layer].to(self._device)
