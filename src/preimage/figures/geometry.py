"""The figures of arXiv 2511.14808, drawn from measured geometry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from preimage.errors import OptionError
from preimage.geometry.result import Geometry, LayerGeometry
from preimage.layers import Layer

Quantity = Callable[[LayerGeometry], float | None]
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"]
_MARGIN, _RATIO = "normalised margin, quantile", "normalised co-Lipschitz, quantile"
_NORMALISED: dict[str, Quantity] = {
    _MARGIN: lambda layer: layer.normalised_margin_quantile,
    _RATIO: lambda layer: layer.normalised_colipschitz_quantile,
}


def layer_figure(shapes: Mapping[str, Geometry]) -> go.Figure:
    """Figure 1: mean norm, margin and co-Lipschitz constant by layer, raw; one curve a measurement."""
    _require_equal(shapes.values())
    return _panels(
        {name: shape.layers for name, shape in shapes.items()},
        {
            "mean norm": lambda layer: layer.mean_norm,
            "margin, quantile": lambda layer: layer.margin_quantile,
            "co-Lipschitz, quantile": lambda layer: layer.colipschitz_quantile,
        },
        "Raw geometry by layer",
    )


def length_figure(shapes: Mapping[str, Mapping[int, Geometry]]) -> go.Figure:
    """Figure 2: normalised values of the last layer against prompt length, one curve a model.

    The third panel has the co-Lipschitz constant with d over the length: raw Hamming distance makes it fall
    like 1/length by itself. Dashed: random tenths of the prompts, with the range of 95 % of them.
    """
    _require_equal(shape for lengths in shapes.values() for shape in lengths.values())
    names = [_MARGIN, _RATIO, f"{_RATIO} x length"]
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=names)
    for number, (name, by_length) in enumerate(shapes.items()):
        lengths = sorted(by_length)
        last = [list(by_length[length].layers.values())[-1] for length in lengths]
        for column, (field, scaled) in enumerate(
            (("margin", False), ("colipschitz", False), ("colipschitz", True)), start=1
        ):
            times = [length if scaled else 1 for length in lengths]
            field = f"normalised_{field}_quantile"
            values = [getattr(one, field) * by for one, by in zip(last, times, strict=True)]
            add_curve(figure, number, name, column == 1, x=lengths, y=values, row=1, col=column)
            if any(one.subsets is None for one in last):
                continue
            some = [one.subsets.intervals[field] for one in last if one.subsets is not None]
            error = {
                "array": [(one.high - one.mean) * by for one, by in zip(some, times, strict=True)],
                "arrayminus": [(one.mean - one.low) * by for one, by in zip(some, times, strict=True)],
            }
            size = last[0].subsets.size if last[0].subsets else 0
            add_curve(
                figure, number, f"{name}, {size} prompts", column == 1, legendgroup=name, line_dash="dash",
                x=lengths, y=[one.mean * by for one, by in zip(some, times, strict=True)], error_y=error,
                row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title="tokens a prompt", type="log")
    figure.update_yaxes(type="log")
    return _styled(figure, "The last layer against prompt length")


def family_figure(shapes: Mapping[str, Geometry]) -> go.Figure:
    """Figure 3: normalised margin and co-Lipschitz constant by relative depth, one curve a model."""
    _require_equal(shapes.values())
    curves = {name: shape.layers for name, shape in shapes.items()}
    return _panels(curves, _NORMALISED, "Normalised geometry by depth", relative=True)


def quantised_figure(shape: Geometry) -> go.Figure:
    """Figure 4: full precision against fewer bits, by layer."""
    quantities: dict[str, Quantity] = {
        "mean norm": lambda layer: layer.mean_norm,
        _MARGIN: _NORMALISED[_MARGIN],
        "collisions": lambda layer: float(layer.collisions),
        _RATIO: _NORMALISED[_RATIO],
    }
    return _panels(shape.sets, quantities, "States in fewer bits")


def near_collision_figure(shape: Geometry) -> go.Figure:
    """Figure 5: shares of near-collisions by layer and eps, full precision and fewer bits; blank: none."""
    sets = shape.sets
    figure = make_subplots(rows=len(sets), cols=1, subplot_titles=list(sets), shared_xaxes=True)
    for row, layers in enumerate(sets.values(), start=1):
        measured = list(layers.values())
        eps = list(measured[0].near_collisions)
        figure.add_heatmap(
            x=[str(layer) for layer in layers],
            y=eps,
            z=[[math.log10(one.near_collisions[e] or math.nan) for one in measured] for e in eps],
            coloraxis="coloraxis",
            row=row,
            col=1,
        )
    figure.update_yaxes(type="category", title="eps")
    figure.update_xaxes(type="category")
    figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": {"title": "log10 share"}})
    return _styled(figure, "Near-collisions: D <= eps")


def _require_equal(shapes: Iterable[Geometry]) -> None:
    """Nearest distances shrink with the number of prompts: only equal numbers are drawn together."""
    counts = sorted({shape.prompts for shape in shapes})
    if len(counts) > 1:
        raise OptionError(
            f"These were measured on {', '.join(map(str, counts))} prompts.",
            "Compare measurements on equally many.",
        )


def _panels(
    curves: Mapping[str, Mapping[Layer, LayerGeometry]],
    quantities: Mapping[str, Quantity],
    title: str,
    relative: bool = False,
) -> go.Figure:
    """One panel a quantity, one curve a set of layers."""
    figure = make_subplots(rows=1, cols=len(quantities), subplot_titles=list(quantities))
    for number, (name, layers) in enumerate(curves.items()):
        x = (
            [place / max(1, len(layers) - 1) for place in range(len(layers))]
            if relative
            else [str(layer) for layer in layers]
        )
        for column, quantity in enumerate(quantities.values(), start=1):
            y = [quantity(measured) or None for measured in layers.values()]  # a logarithmic axis has no 0
            add_curve(figure, number, name, column == 1, x=x, y=y, row=1, col=column)
    figure.update_xaxes(title="depth" if relative else "layer", type="linear" if relative else "category")
    figure.update_yaxes(type="log")
    return _styled(figure, title)


def add_curve(figure: go.Figure, number: int, name: str, first: bool, **shown: Any) -> None:
    """A curve in the colour of its number; ``first``: the one of its name that the legend shows."""
    style = {"legendgroup": name, "mode": "lines+markers", "line_color": COLOURS[number % len(COLOURS)]}
    figure.add_scatter(name=name, showlegend=first, **style | shown)


def _styled(figure: go.Figure, title: str) -> go.Figure:
    return figure.update_layout(title=title, template="plotly_white")
