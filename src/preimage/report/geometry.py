"""The figures of arXiv 2511.14808, drawn from measured geometry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from preimage.layers import Layer
from preimage.results import Geometry, LayerGeometry

Quantity = Callable[[LayerGeometry], float | None]


def layer_figure(shape: Geometry) -> go.Figure:
    """Figure 1: mean norm, margin and co-Lipschitz constant by layer, raw."""
    return _panels(
        {"": shape.layers},
        {
            "mean norm": lambda found: found.mean_norm,
            "margin, quantile": lambda found: found.margin_quantile,
            "co-Lipschitz, quantile": lambda found: found.colipschitz_quantile,
        },
        "Raw geometry by layer",
    )


def family_figure(shapes: Mapping[str, Geometry]) -> go.Figure:
    """Figure 3: normalised margin and co-Lipschitz constant by relative depth, one curve a model."""
    curves = {name: shape.layers for name, shape in shapes.items()}
    return _panels(curves, _NORMALISED, "Normalised geometry by depth", relative=True)


def length_figure(shapes: Mapping[int, Geometry]) -> go.Figure:
    """Figure 2: normalised values of the last layer against prompt length; raw and length-normalised d."""
    names = [*_NORMALISED, "normalised co-Lipschitz x length"]
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=names)
    ordered = sorted(shapes)
    last = [list(shapes[length].layers.values())[-1] for length in ordered]
    values = [[quantity(found) for found in last] for quantity in _NORMALISED.values()]
    values.append(
        [length * v if v is not None else None for length, v in zip(ordered, values[-1], strict=True)]
    )
    for column, points in enumerate(values, start=1):
        figure.add_scatter(x=ordered, y=points, mode="lines+markers", showlegend=False, row=1, col=column)
    figure.update_xaxes(title="tokens a prompt", type="log")
    figure.update_yaxes(type="log")
    return _styled(figure, "The last layer against prompt length")


def quantised_figure(shape: Geometry) -> go.Figure:
    """Figure 4: full precision against fewer bits, by layer."""
    curves = {"full precision": shape.layers}
    curves |= {f"{bits} bits": some.layers for bits, some in shape.quantised.items()}
    quantities: dict[str, Quantity] = {
        "mean norm": lambda found: found.mean_norm,
        "normalised margin, quantile": lambda found: found.normalised_margin_quantile,
        "collisions": lambda found: float(found.collisions),
        "normalised co-Lipschitz, quantile": lambda found: found.normalised_colipschitz_quantile,
    }
    return _panels(curves, quantities, "States in fewer bits")


def near_collision_figure(shape: Geometry) -> go.Figure:
    """Figure 5: shares of near-collisions by layer and eps, full precision and fewer bits."""
    sets = {"full precision": shape.layers}
    sets |= {f"{bits} bits": some.layers for bits, some in shape.quantised.items()}
    figure = make_subplots(rows=len(sets), cols=1, subplot_titles=list(sets), shared_xaxes=True)
    for row, layers in enumerate(sets.values(), start=1):
        found = list(layers.values())
        eps = list(found[0].near_collisions)
        figure.add_heatmap(
            x=[str(layer) for layer in layers],
            y=eps,
            z=[[one.near_collisions[e] for one in found] for e in eps],
            coloraxis="coloraxis",
            row=row,
            col=1,
        )
    figure.update_yaxes(type="category", title="eps")
    figure.update_xaxes(type="category")
    figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": {"title": "share of pairs"}})
    return _styled(figure, "Near-collisions: D <= eps")


_NORMALISED: dict[str, Quantity] = {
    "normalised margin, quantile": lambda found: found.normalised_margin_quantile,
    "normalised co-Lipschitz, quantile": lambda found: found.normalised_colipschitz_quantile,
}


def _panels(
    curves: Mapping[str, Mapping[Layer, LayerGeometry]],
    quantities: Mapping[str, Quantity],
    title: str,
    relative: bool = False,
) -> go.Figure:
    """One panel a quantity, one curve a set of layers."""
    figure = make_subplots(rows=1, cols=len(quantities), subplot_titles=list(quantities))
    colours = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"]
    for number, (name, layers) in enumerate(curves.items()):
        x = (
            [place / max(1, len(layers) - 1) for place in range(len(layers))]
            if relative
            else [str(layer) for layer in layers]
        )
        for column, quantity in enumerate(quantities.values(), start=1):
            figure.add_scatter(
                x=x,
                y=[quantity(found) or None for found in layers.values()],  # a logarithmic axis has no 0
                name=name,
                legendgroup=name,
                showlegend=bool(name) and column == 1,
                mode="lines+markers",
                line={"color": colours[number % len(colours)]},
                row=1,
                col=column,
            )
    figure.update_xaxes(title="depth" if relative else "layer", type="linear" if relative else "category")
    figure.update_yaxes(type="log")
    return _styled(figure, title)


def _styled(figure: go.Figure, title: str) -> go.Figure:
    return figure.update_layout(title=title, template="plotly_white")
