"""The figures of arXiv 2511.14808, drawn from measured geometry."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from preimage.errors import OptionError
from preimage.figures.style import COLOUR_BAR, Zeros, curve_style, layer_axis, noted
from preimage.geometry.result import Geometry, LayerGeometry
from preimage.layers import Layer

Quantity = Callable[[LayerGeometry], float | None]
_PANEL = 300  # pixels of one, where they stand below one another
_MARGIN, _RATIO = "normalised margin, quantile", "normalised co-Lipschitz, quantile"
_NORMALISED: dict[str, Quantity] = {
    _MARGIN: lambda layer: layer.normalised_margin_quantile,
    _RATIO: lambda layer: layer.normalised_colipschitz_quantile,
}


def layer_figure(shapes: Mapping[str, Geometry], *, stacked: bool = False) -> go.Figure:
    """Figure 1: mean norm, margin and co-Lipschitz constant by layer, raw; one curve a measurement.

    ``stacked``, here and below: panels below one another, as a narrow screen wants them.
    """
    _require_equal(shapes.values())
    return _panels(
        {name: shape.layers for name, shape in shapes.items()},
        {
            "mean norm": lambda layer: layer.mean_norm,
            "margin, quantile": lambda layer: layer.margin_quantile,
            "co-Lipschitz, quantile": lambda layer: layer.colipschitz_quantile,
        },
        "Raw geometry by layer",
        stacked=stacked,
    )


def length_figure(shapes: Mapping[str, Mapping[int, Geometry]], *, stacked: bool = False) -> go.Figure:
    """Figure 2: normalised values of the last layer against prompt length, one curve a model.

    The third panel has the co-Lipschitz constant with d over the length: raw Hamming distance makes it fall
    like 1/length by itself. Dashed: random tenths of the prompts, with the range of 95 % of them.
    """
    _require_equal(shape for lengths in shapes.values() for shape in lengths.values())
    names = [_MARGIN, _RATIO, f"{_RATIO} x length"]
    figure, places = _grid(names, stacked)
    zeros = Zeros("length")
    for number, (name, by_length) in enumerate(shapes.items()):
        lengths = sorted(by_length)
        last = [list(by_length[length].layers.values())[-1] for length in lengths]
        for column, (field, scaled) in enumerate(
            (("margin", False), ("colipschitz", False), ("colipschitz", True)), start=1
        ):
            times = [length if scaled else 1 for length in lengths]
            field = f"normalised_{field}_quantile"
            values = [getattr(one, field) * by for one, by in zip(last, times, strict=True)]
            row, col = places[column - 1]
            y = zeros.add(names[column - 1], lengths, values, name)
            add_curve(figure, number, name, column == 1, x=lengths, y=y, row=row, col=col)
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
                row=row, col=col,
            )  # fmt: skip
    counts = sorted({length for by_length in shapes.values() for length in by_length})
    figure.update_xaxes(title="tokens a prompt", type="log", tickvals=counts)
    return noted(_styled(figure, "The last layer against prompt length"), zeros.words)


def family_figure(shapes: Mapping[str, Geometry], *, stacked: bool = False) -> go.Figure:
    """Figure 3: normalised margin and co-Lipschitz constant by relative depth, one curve a model."""
    _require_equal(shapes.values())
    curves = {name: shape.layers for name, shape in shapes.items()}
    return _panels(curves, _NORMALISED, "Normalised geometry by depth", relative=True, stacked=stacked)


def quantised_figure(shape: Geometry, *, stacked: bool = False) -> go.Figure:
    """Figure 4: full precision against fewer bits, by layer."""
    quantities: dict[str, Quantity] = {
        "mean norm": lambda layer: layer.mean_norm,
        _MARGIN: _NORMALISED[_MARGIN],
        "collisions": lambda layer: float(layer.collisions),
        _RATIO: _NORMALISED[_RATIO],
    }
    return _panels(shape.sets, quantities, "States in fewer bits", stacked=stacked)


def near_collision_figure(shape: Geometry) -> go.Figure:
    """Figure 5: shares of near-collisions by layer and eps, full precision and fewer bits; blank: none."""
    sets = shape.sets
    figure = make_subplots(
        rows=len(sets), cols=1, subplot_titles=list(sets), shared_xaxes=True, vertical_spacing=0.3 / len(sets)
    )
    none = []
    for row, (name, layers) in enumerate(sets.items(), start=1):
        measured = list(layers.values())
        eps = list(measured[0].near_collisions)
        shares = [[one.near_collisions[e] for one in measured] for e in eps]
        if not any(map(any, shares)):
            none.append(name)
        figure.add_heatmap(
            x=[str(layer) for layer in layers],
            y=eps,
            z=[[math.log10(share or math.nan) for share in some] for some in shares],
            customdata=shares,
            hovertemplate="layer %{x}, eps %{y}: %{customdata:.3g} of all pairs<extra></extra>",
            coloraxis="coloraxis",
            row=row,
            col=1,
        )
    figure.update_yaxes(type="category", title="eps")
    figure.update_xaxes(**layer_axis(list(shape.layers)) | {"title": None})
    figure.update_xaxes(title="layer", row=len(sets), col=1)
    figure.update_layout(
        coloraxis={"colorscale": "Cividis", "colorbar": COLOUR_BAR}, height=160 + 190 * len(sets)
    )
    blank = f"No pair at all in {', '.join(none)}." if none else ""
    return noted(
        _styled(figure, "Near-collisions: share of pairs with D <= eps, log10"), "Blank: no pair.", blank
    )


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
    *,
    relative: bool = False,
    stacked: bool = False,
) -> go.Figure:
    """One panel a quantity, one curve a set of layers."""
    figure, places = _grid(list(quantities), stacked)
    zeros = Zeros("layer")
    for number, (name, layers) in enumerate(curves.items()):
        x = (
            [place / max(1, len(layers) - 1) for place in range(len(layers))]
            if relative
            else [str(layer) for layer in layers]
        )
        for (what, quantity), (row, column) in zip(quantities.items(), places, strict=True):
            values = [quantity(measured) for measured in layers.values()]
            y, first = zeros.add(what, list(layers), values, name), (row, column) == places[0]
            add_curve(figure, number, name, first, x=x, y=y, row=row, col=column)
    depth = {"title": "depth: 0 the embeddings, 1 the last layer"}
    longest = max((list(layers) for layers in curves.values()), key=len)
    figure.update_xaxes(**depth if relative else layer_axis(longest))
    return noted(_styled(figure, title), zeros.words)


def _grid(names: Sequence[str], stacked: bool) -> tuple[go.Figure, list[tuple[int, int]]]:
    """Panels with logarithmic axes that say what is on them, and the row and column of each."""
    count = len(names)
    places = [(number, 1) if stacked else (1, number) for number in range(1, count + 1)]
    rows, columns = places[-1]
    spacing = {"vertical_spacing": 0.3 / count} if stacked else {"horizontal_spacing": 0.24 / count}
    figure = make_subplots(rows=rows, cols=columns, **spacing)
    for name, (row, column) in zip(names, places, strict=True):
        figure.update_yaxes(type="log", title=name, row=row, col=column)
    return figure.update_layout(height=80 + _PANEL * count if stacked else None), places


def add_curve(figure: go.Figure, number: int, name: str, first: bool, **shown: Any) -> None:
    """A curve in the style of its number; ``first``: the one of its name that the legend shows."""
    style = {"legendgroup": name, "mode": "lines+markers", **curve_style(number)}
    figure.add_scatter(name=name, showlegend=first, **style | shown)


def _styled(figure: go.Figure, title: str) -> go.Figure:
    return figure.update_layout(title=title, template="plotly_white")
