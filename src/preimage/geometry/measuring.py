"""``preimage.measure_geometry``: how far from a collision a set of states is, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import PairScan, norms, same_rows
from preimage.errors import OptionError, PromptError
from preimage.geometry.options import GeometryOptions
from preimage.geometry.prompt_distances import PromptDistances
from preimage.geometry.ratios import largest_ratio, measure_ratios
from preimage.layers import Layer
from preimage.progress import Progress, silent
from preimage.prompts import PromptSet
from preimage.results import Geometry, LayerGeometry, LayerSet, RunFolder, StepReport
from preimage.states import States

_ROWS = 4096  # looked at together


def measure_geometry(
    states: States,
    bits: Sequence[int | None] | None = None,
    *,
    options: GeometryOptions | None = None,
    device: str | torch.device = "cpu",
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> Geometry:
    """The diagnostics of arXiv 2511.14808 on the last states of every prompt, at every layer kept.

    ``bits`` are those of post-hoc quantisation, None for full precision, which is always measured. Prompts
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
    prompts = PromptDistances(states.token_ids, device)
    wanted = [number for number in chosen.bits if number is not None]
    folder = None
    if out is not None:
        plan = {
            "command": "geometry",
            "model": states.model,
            "prompts": PromptSet(states.token_ids, "list", 0, 0).fingerprint,
            "layers": list(states.layers),
            "options": chosen.to_dict(),
        }
        folder = RunFolder(out, plan)
    found: dict[Layer, dict[int | None, LayerGeometry]] = {}
    for done, layer in enumerate(states.layers):
        progress(done, len(states.layers), f"layers measured, now {layer}")
        if folder is not None and str(layer) in folder.items:
            kept = folder.items[str(layer)]["precisions"]
            found[layer] = {measured["bits"]: LayerGeometry.from_dict(measured["found"]) for measured in kept}
            continue
        found[layer] = _precisions(states, layer, prompts, wanted, chosen, device)
        if folder is not None:
            precisions = [{"bits": number, "found": asdict(g)} for number, g in found[layer].items()]
            folder.add(str(layer), {"precisions": precisions})
    progress(len(states.layers), len(states.layers), "layers measured")
    result = Geometry(
        prompts=len(states),
        prompt_distance=prompts.name,
        options=chosen.to_dict(),
        layers={layer: measured[None] for layer, measured in found.items()},
        quantised={
            number: LayerSet({layer: measured[number] for layer, measured in found.items()})
            for number in wanted
        },
    )
    if folder is not None:
        folder.finish({"results": result.to_dict()})
        folder.write_table("layers", result.rows())
    return result


def _precisions(
    states: States,
    layer: Layer,
    prompts: PromptDistances,
    wanted: Sequence[int],
    options: GeometryOptions,
    device: str | torch.device,
) -> dict[int | None, LayerGeometry]:
    """One layer in full precision and in every number of bits."""
    states.require_finite(layer)
    x = states.last(layer).to(device)
    found: dict[int | None, LayerGeometry] = {None: _measure(layer, x, prompts, options)}
    for number in wanted:
        grid = replace(options.quantiser, bits=number).fit(x)
        codes = grid.encode(x)
        step = float(grid.step.max())
        report = StepReport(
            bits=number,
            step=step,
            relative_step=step / float(x.double().abs().mean().clamp_min(1e-300)),
            occupancy=float((codes != grid.zero.to(codes.dtype)).double().mean()),
            certified=found[None].margin > step * math.sqrt(x.shape[1]),
        )
        stored = grid.decode(codes)
        equal = codes if grid.step.shape[0] == 1 else stored  # steps of their own: codes alone say little
        found[number] = _measure(layer, stored, prompts, options, equal, report)
    return found


def _measure(
    layer: Layer,
    x: Float[Tensor, "row d"],
    prompts: PromptDistances,
    options: GeometryOptions,
    codes: Tensor | None = None,
    report: StepReport | None = None,
) -> LayerGeometry:
    scan = PairScan(x)
    ratios = measure_ratios(scan, prompts)
    lengths = norms(x)
    mean_norm = float(lengths.mean())
    same = scan.same if codes is None else same_rows(codes.double())
    sizes = same.bincount()
    near = _shares(scan, options.eps)
    relative = _shares(scan, [eps * mean_norm for eps in options.eps])
    margin, margin_quantile = _least(ratios.first, options.quantile)
    alpha, alpha_quantile = _least(ratios.smallest, options.quantile)
    nearest, nearest_quantile = _least(ratios.at_nearest, options.quantile)
    upper = largest_ratio(scan, prompts, x)
    over = 1 / mean_norm if mean_norm else math.nan
    long = prompts.largest if prompts.name == "hamming" else None
    return LayerGeometry(
        layer=layer,
        states=len(x),
        pairs=scan.pairs,
        distinct=int((sizes > 0).sum()),
        mean_norm=mean_norm,
        margin=margin,
        margin_quantile=margin_quantile,
        normalised_margin=margin * over,
        normalised_margin_quantile=margin_quantile * over,
        colipschitz=alpha,
        colipschitz_quantile=alpha_quantile,
        nearest_colipschitz=nearest,
        nearest_colipschitz_quantile=nearest_quantile,
        normalised_colipschitz=alpha * over,
        normalised_colipschitz_quantile=alpha_quantile * over,
        length_colipschitz=None if long is None else alpha * long,
        length_colipschitz_quantile=None if long is None else alpha_quantile * long,
        upper=upper,
        distortion=upper / alpha if alpha else None,
        collisions=int((sizes * (sizes - 1) // 2).sum()),
        near_collisions={f"{eps:g}": share for eps, share in zip(options.eps, near, strict=True)},
        relative_near_collisions={f"{e:g}": share for e, share in zip(options.eps, relative, strict=True)},
        anisotropy=_anisotropy(x, lengths),
        intrinsic_dimension=_intrinsic_dimension(ratios.first, ratios.second),
        quantised=report,
    )


def _least(values: Float[Tensor, " row"], quantile: float) -> tuple[float, float]:
    return float(values.min()), float(values.quantile(quantile))


def _shares(scan: PairScan, eps: Sequence[float]) -> list[float]:
    """The share of all pairs no farther apart than each eps."""
    return [count / scan.pairs for count in scan.count_below([math.nextafter(e, math.inf) for e in eps])]


def _anisotropy(x: Float[Tensor, "row d"], lengths: Float[Tensor, " row"]) -> float:
    """The mean cosine of two different states: of n unit vectors, (|sum|^2 - n) / (n (n - 1))."""
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    known = 0
    for part, norm in zip(x.split(_ROWS), lengths.split(_ROWS), strict=True):
        some = norm > 0  # a state of length 0 has no direction
        total += (part[some].double() / norm[some][:, None]).sum(dim=0)
        known += int(some.sum())
    return float((total.square().sum() - known) / (known * (known - 1))) if known > 1 else math.nan


def _intrinsic_dimension(first: Float[Tensor, " row"], second: Float[Tensor, " row"]) -> float | None:
    """TwoNN by maximum likelihood: rows over the sum of log(second / first nearest distance)."""
    some = (first > 0) & (second > first) & torch.isfinite(second)
    logs = (second[some] / first[some]).log()
    return float(len(logs) / logs.sum()) if len(logs) else None
