"""One layer, one precision: every quantity of its states, and intervals by subsampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import PairScan, norms
from preimage.distances.prompt_distances import PromptDistances
from preimage.geometry.options import GeometryOptions
from preimage.geometry.ratios import Ratios, largest_ratio, measure_ratios
from preimage.geometry.result import Interval, LayerGeometry, StepReport, Subsets
from preimage.layers import Layer

_ROWS = 4096  # looked at together
_TENTHS = 10  # a subset is one of so many parts
_FEWEST = 10  # prompts of a subset


def measure_layer(
    layer: Layer,
    x: Float[Tensor, "row d"],
    prompts: PromptDistances,
    options: GeometryOptions,
    same: Int[Tensor, " row"] | None = None,
    report: StepReport | None = None,
    subsets: Subsets | None = None,
) -> LayerGeometry:
    """Everything about one set of states; ``same`` names for each the first equal to it, if not its bits."""
    scan = PairScan(x)
    ratios = measure_ratios(scan, prompts)
    sizes = (scan.same if same is None else same).bincount()
    least = _least(x, ratios, options.quantile)
    mean_norm, alpha = least["mean_norm"], least["colipschitz"]
    upper = largest_ratio(scan, prompts, x)
    long = prompts.largest if prompts.name == "hamming" else None
    near = _shares(scan, options.eps)
    relative = _shares(scan, [eps * mean_norm for eps in options.eps])
    return LayerGeometry(
        layer=layer,
        states=len(x),
        pairs=scan.pairs,
        distinct=int((sizes > 0).sum()),
        **least,
        length_colipschitz=None if long is None else alpha * long,
        length_colipschitz_quantile=None if long is None else least["colipschitz_quantile"] * long,
        upper=upper,
        distortion=upper / alpha if alpha else None,
        collisions=int((sizes * (sizes - 1) // 2).sum()),
        near_collisions={f"{eps:g}": share for eps, share in zip(options.eps, near, strict=True)},
        relative_near_collisions={f"{e:g}": share for e, share in zip(options.eps, relative, strict=True)},
        anisotropy=_anisotropy(x),
        intrinsic_dimension=_intrinsic_dimension(ratios),
        quantised=report,
        subsets=subsets,
        unexplained=0 if report is None else None,
    )


def measure_subsets(
    x: Float[Tensor, "row d"], prompts: PromptDistances, options: GeometryOptions
) -> Subsets | None:
    """The least distances and ratios of random tenths of the prompts; None where those would be too few.

    A tenth is little enough of the whole for subsets to differ as samples of their size do.
    """
    size = len(x) // _TENTHS
    if not options.subsets or size < _FEWEST:
        return None
    generator = torch.Generator().manual_seed(options.seed)  # the same prompts at every layer
    found: dict[str, list[float]] = {}
    for _ in range(options.subsets):
        rows = torch.randperm(len(x), generator=generator)[:size].to(x.device)
        some = x[rows]
        ratios = measure_ratios(PairScan(some), prompts.subset(rows))
        values = _least(some, ratios, options.quantile) | {"anisotropy": _anisotropy(some)}
        dimension = _intrinsic_dimension(ratios)
        if dimension is not None:
            values["intrinsic_dimension"] = dimension
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return Subsets(options.subsets, size, {name: _interval(values) for name, values in found.items()})


def _interval(values: Sequence[float]) -> Interval:
    ends = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975]).double())
    return Interval(math.fsum(values) / len(values), float(ends[0]), float(ends[1]))


def _least(x: Float[Tensor, "row d"], ratios: Ratios, quantile: float) -> dict[str, float]:
    """Mean norm, margin and co-Lipschitz constants, raw and over the mean norm."""
    mean_norm = float(norms(x).mean())
    found = {"mean_norm": mean_norm}
    for name, values in (
        ("margin", ratios.first),
        ("colipschitz", ratios.smallest),
        ("nearest_colipschitz", ratios.at_nearest),
    ):
        found |= {name: float(values.min()), f"{name}_quantile": float(values.quantile(quantile))}
    for name in ("margin", "margin_quantile", "colipschitz", "colipschitz_quantile"):
        found[f"normalised_{name}"] = found[name] / mean_norm if mean_norm else math.nan
    return found


def _shares(scan: PairScan, eps: Sequence[float]) -> list[float]:
    """The share of all pairs no farther apart than each eps."""
    return [count / scan.pairs for count in scan.count_below([math.nextafter(e, math.inf) for e in eps])]


def _anisotropy(x: Float[Tensor, "row d"]) -> float:
    """The mean cosine of two different states: of n unit vectors, (|sum|^2 - n) / (n (n - 1))."""
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    known = 0
    for part in x.split(_ROWS):
        norm = norms(part)
        some = norm > 0  # a state of length 0 has no direction
        total += (part[some].double() / norm[some][:, None]).sum(dim=0)
        known += int(some.sum())
    return float((total.square().sum() - known) / (known * (known - 1))) if known > 1 else math.nan


def _intrinsic_dimension(ratios: Ratios) -> float | None:
    """TwoNN by maximum likelihood: rows over the sum of log(second / first nearest distance).

    Rows whose two nearest are equally far, up to the last bits, say nothing and are left out.
    """
    first, second = ratios.first, ratios.second
    some = (first > 0) & (second > first * (1 + 1e-9)) & torch.isfinite(second)
    logs = (second[some] / first[some]).log()
    return float(len(logs) / logs.sum()) if len(logs) else None
