"""One layer, one precision: every quantity of its states, and intervals by subsampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import PairScan, count_below, count_equal_pairs, norms
from preimage.distances.prompt_distances import PromptDistances
from preimage.geometry.options import GeometryOptions
from preimage.geometry.ratios import Ratios, largest_ratio, measure_ratios
from preimage.geometry.result import Interval, LayerGeometry, StepReport, Subsets
from preimage.layers import Layer

_ROWS = 4096  # looked at together
_TENTHS = 10  # a subset is one of so many parts
_FEWEST = 10  # prompts of a subset
_TIED = 1 + 1e-9  # two nearest states are equally far, up to last bits, where one is not farther by this


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
    same = scan.rows.same if same is None else same
    smallest = _smallest(x, ratios, options.quantile)
    mean_norm, colipschitz = smallest["mean_norm"], smallest["colipschitz"]
    lipschitz = largest_ratio(scan, prompts, x)
    length = prompts.largest if prompts.name == "hamming" else None
    return LayerGeometry(
        layer=layer,
        states=len(x),
        pairs=scan.pairs,
        distinct=len(same.unique()),
        **smallest,
        length_colipschitz=None if length is None else colipschitz * length,
        length_colipschitz_quantile=None if length is None else smallest["colipschitz_quantile"] * length,
        lipschitz=lipschitz,
        distortion=lipschitz / colipschitz if colipschitz else None,
        collisions=count_equal_pairs(same),
        near_collisions=_near_shares(scan, options.eps),
        relative_near_collisions=_near_shares(scan, options.eps, mean_norm),
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
    drawn: dict[str, list[float]] = {}
    for _ in range(options.subsets):
        rows = torch.randperm(len(x), generator=generator)[:size].to(x.device)
        some = x[rows]
        ratios = measure_ratios(PairScan(some), prompts.subset(rows))
        values = _smallest(some, ratios, options.quantile) | {"anisotropy": _anisotropy(some)}
        dimension = _intrinsic_dimension(ratios)
        if dimension is not None:
            values["intrinsic_dimension"] = dimension
        for name, value in values.items():
            drawn.setdefault(name, []).append(value)
    return Subsets(options.subsets, size, {name: _interval(values) for name, values in drawn.items()})


def _interval(values: Sequence[float]) -> Interval:
    ends = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975]).double())
    return Interval(math.fsum(values) / len(values), float(ends[0]), float(ends[1]))


def _smallest(x: Float[Tensor, "row d"], ratios: Ratios, quantile: float) -> dict[str, float]:
    """Mean norm, margin and co-Lipschitz constants, raw and over the mean norm."""
    mean_norm = float(norms(x).mean())
    quantities = {"mean_norm": mean_norm}
    for name, values in (
        ("margin", ratios.first),
        ("colipschitz", ratios.smallest),
        ("nearest_colipschitz", ratios.at_nearest),
    ):
        quantities |= {name: float(values.min()), f"{name}_quantile": float(values.quantile(quantile))}
    for name in ("margin", "margin_quantile", "colipschitz", "colipschitz_quantile"):
        quantities[f"normalised_{name}"] = quantities[name] / mean_norm if mean_norm else math.nan
    return quantities


def _near_shares(scan: PairScan, eps: Sequence[float], unit: float = 1.0) -> dict[str, float]:
    """The share of all pairs no farther apart than each eps, in units of so much, by that eps."""
    counts = count_below(scan, [math.nextafter(value * unit, math.inf) for value in eps])
    return {f"{value:g}": count / scan.pairs for value, count in zip(eps, counts, strict=True)}


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

    Rows whose two nearest are equally far say nothing and are left out.
    """
    first, second = ratios.first, ratios.second
    some = (first > 0) & (second > first * _TIED) & torch.isfinite(second)
    logs = (second[some] / first[some]).log()
    return float(len(logs) / logs.sum()) if len(logs) else None
