"""``preimage.measure_geometry``: how far from a collision a set of states is, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions import find_collisions
from preimage.distances import same_rows
from preimage.distances.prompt_distances import PromptDistances
from preimage.errors import OptionError, PromptError
from preimage.geometry.layer import measure_layer, measure_subsets
from preimage.geometry.options import GeometryOptions
from preimage.geometry.propagating import Stored, propagate
from preimage.geometry.result import Geometry, LayerGeometry, LayerSet, StepReport
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptSet
from preimage.states import States
from preimage.storage import Run


def measure_geometry(
    states: States,
    bits: Sequence[int | None] | None = None,
    *,
    options: GeometryOptions | None = None,
    model: LanguageModel | None = None,
    device: str | torch.device = "cpu",
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> Geometry:
    """The diagnostics of arXiv 2511.14808 on the last states of every prompt, at every layer kept.

    ``bits`` are those of quantised states, None for full precision, which is always measured; with
    ``propagate=True`` they are carried on through ``model``, which must be the one that made them. Prompts
    must differ, and their ids must be known: co-Lipschitz constants divide by their distance. With ``out``
    every layer is kept in that run folder as it ends, and calling again continues.
    """
    if bits is not None:
        changes["bits"] = tuple(bits)
    chosen = replace(options or GeometryOptions(), **changes)
    if states.token_ids is None:
        raise OptionError("The token ids of these states were withheld.", "Capture them with their ids.")
    if len(states) < 2:
        raise PromptError(f"{len(states)} prompts make no pair.", "Give at least two.")
    if len(set(states.token_ids)) < len(states):
        raise PromptError("Some of these prompts are the same.", "Capture every prompt once.")
    if chosen.propagate and model is None:
        raise OptionError("propagate needs the model that made the states.", "Give model as well.")
    if model is not None:
        states.require_made_by(model)
    layers = _Layers(states, chosen, device, model, progress)
    wanted = [number for number in chosen.bits if number is not None]
    run = Run(plan_of(states.model, states.token_ids, states.layers, chosen), out)
    found: dict[Layer, dict[int | None, LayerGeometry]] = {}
    for layer in run.done(states.layers):
        kept = run.items[str(layer)]["precisions"]
        found[layer] = {measured["bits"]: LayerGeometry.from_dict(measured["found"]) for measured in kept}

    def measure(layer: Layer) -> None:
        found[layer] = layers.at(layer)
        precisions = [{"bits": number, "found": asdict(g)} for number, g in found[layer].items()]
        run.keep(layer, {"precisions": precisions})

    run.each(states.layers, measure, progress, "layers measured")
    found = {layer: found[layer] for layer in states.layers}
    result = Geometry(
        prompts=len(states),
        prompt_distance=layers.prompts.name,
        options=chosen.to_dict(),
        layers={layer: measured[None] for layer, measured in found.items()},
        quantised={
            number: LayerSet({layer: measured[number] for layer, measured in found.items()})
            for number in wanted
        },
        length=layers.prompts.largest if layers.prompts.name == "hamming" else None,
    )
    run.finish(result.to_dict, {"layers": result.rows})
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


class _Layers:
    """One measurement under way: layer by layer, full precision and every number of bits."""

    def __init__(
        self,
        states: States,
        options: GeometryOptions,
        device: str | torch.device,
        model: LanguageModel | None,
        progress: Progress,
    ) -> None:
        assert states.token_ids is not None
        self._states, self._options, self._device, self._model = states, options, device, model
        self._progress = progress
        self.prompts = PromptDistances(states.token_ids, device)
        self._carried: dict[int, dict[Layer, Stored]] = {}

    def at(self, layer: Layer) -> dict[int | None, LayerGeometry]:
        """What one layer shows."""
        self._states.require_finite(layer)
        x = self._states.last(layer).to(self._device)
        subsets = measure_subsets(x, self.prompts, self._options)
        full = measure_layer(layer, x, self.prompts, self._options, subsets=subsets)
        if full.collisions:
            full = replace(full, unexplained=self._unexplained(layer, x))
        found: dict[int | None, LayerGeometry] = {None: full}
        for bits in self._options.bits:
            if bits is None:
                continue
            grid, codes, mean = self._stored(layer, x, bits)
            values, step = grid.decode(codes), float(grid.step.max())
            report = StepReport(
                bits=bits,
                step=step,
                relative_step=step / max(mean, 1e-300),
                occupancy=float((codes != grid.zero.to(codes.dtype)).double().mean()),
                certified=None if self._options.propagate else grid.certifies(full.margin, x, values),
            )
            same = same_rows((codes if grid.shared else values).double())
            found[bits] = measure_layer(layer, values, self.prompts, self._options, same, report)
        return found

    def _unexplained(self, layer: Layer, x: Float[Tensor, "row d"]) -> int:
        """How many pairs of equal states no structure explains, by the search for collisions itself."""
        ids = self._states.token_ids
        assert ids is not None
        groups: dict[int, list[tuple[int, ...]]] = {}
        for row, first in enumerate(same_rows(x).tolist()):
            groups.setdefault(first, []).append(ids[row])
        if layer == 0:  # that of the last token, and its place
            groups = {first: some for first, some in groups.items() if len({row[-1] for row in some}) > 1}
        alike = [some for some in groups.values() if len(some) > 1]
        if self._model is None or not alike:
            return sum(len(some) * (len(some) - 1) // 2 for some in alike)
        prompts = [row for some in alike for row in some]
        return find_collisions(self._model, prompts, [layer], hard_bases=0).unexplained

    def _stored(self, layer: Layer, x: Float[Tensor, "row d"], bits: int) -> Stored:
        quantiser = replace(self._options.quantiser, bits=bits)
        if not self._options.propagate:
            grid = quantiser.fit(x)
            return Stored(grid, grid.encode(x), float(x.double().abs().mean()))
        if bits not in self._carried:
            assert self._model is not None
            assert self._states.token_ids is not None
            self._carried[bits] = propagate(
                self._model, self._states.token_ids, quantiser, self._states.layers, self._progress
            )
        return self._carried[bits][layer].to(self._device)
