"""How far apart the states of a set of prompts are: layer by layer, and after a prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from preimage.collisions.result import CollisionAudit, ContinuationScan, Spacing
from preimage.figures.style import COLOUR_BAR, Zeros, curve_style, layer_axis, noted

Curves = Mapping[str, Sequence[float | None]]


def spacing_figure(audit: CollisionAudit) -> go.Figure:
    """Closest pair, quantiles and noise radius of all pairs, and the closest hard pair, by layer."""
    layers = [layer.layer for layer in audit.layers]
    curves = _curves([layer.spacing for layer in audit.layers])
    curves["closest hard pair that must differ"] = [
        min((kind.margin for kind in layer.hard if kind.margin is not None), default=None)
        for layer in audit.layers
    ]
    figure = _drawn(curves, [str(layer) for layer in layers], "layer")
    figure.update_xaxes(**layer_axis(layers))
    figure.update_layout(title=f"Distances of all pairs of {audit.prompts:,} prompts, by layer")
    return figure


def margins_figure(audits: Mapping[str, CollisionAudit]) -> go.Figure:
    """The closest pair that must differ, by layer, a curve an audit; dotted: what is noise there."""
    figure, zeros = go.Figure(), Zeros("layer")
    for number, (name, audit) in enumerate(audits.items()):
        layers = [layer.layer for layer in audit.layers]
        margins = [layer.spacing.margin for layer in audit.layers]
        noise = [layer.spacing.noise_radius for layer in audit.layers]
        x, style = [str(layer) for layer in layers], curve_style(number)
        y = zeros.add("the distance", layers, margins, name)
        figure.add_scatter(x=x, y=y, name=name, mode="lines+markers", **style)
        line = {"color": style["line"]["color"], "dash": "dot", "width": 1}
        figure.add_scatter(
            x=x, y=zeros.add("the noise", layers, noise, name), name=f"{name}: noise", mode="lines", line=line
        )
    longest = max((audit.layers for audit in audits.values()), key=len)
    figure.update_xaxes(**layer_axis([layer.layer for layer in longest]))
    figure.update_yaxes(type="log", title="distance of last states")
    figure.update_layout(title="The closest pair that must differ, by layer", template="plotly_white")
    return noted(figure, zeros.words)


def near_pairs_figure(audit: CollisionAudit) -> go.Figure:
    """How many pairs are nearer than each threshold, and how many within noise, by layer; blank: none."""
    spacings = [layer.spacing for layer in audit.layers]
    counts = {f"D < {threshold}": [one.below[threshold] for one in spacings]
              for threshold in spacings[0].below}  # fmt: skip
    counts |= {
        "within noise": [one.within_noise for one in spacings],
        "unexplained": [one.unexplained for one in spacings],
        "bit-equal": [one.states - one.distinct for one in spacings],
    }
    rows = list(counts)[::-1]  # the first on top
    layers = [layer.layer for layer in audit.layers]
    figure = go.Figure(
        go.Heatmap(
            z=[[math.log10(count or math.nan) for count in counts[row]] for row in rows],
            x=[str(layer) for layer in layers], y=rows, customdata=[counts[row] for row in rows],
            hovertemplate="layer %{x}, %{y}: %{customdata:,}<extra></extra>", colorscale="Cividis",
            colorbar=COLOUR_BAR, xgap=1, ygap=2,
        )
    )  # fmt: skip
    figure.update_xaxes(**layer_axis(layers))
    figure.update_yaxes(type="category", automargin=True, title="pairs")
    figure.update_layout(
        title="Near-collisions by layer: how many pairs, log10", template="plotly_white", height=320
    )
    none = [row for row in counts if not any(counts[row])]
    return noted(
        figure,
        "Blank: none; bit-equal counts states that are another's to the bit."
        + (f" None at any layer: {', '.join(none)}." if none else ""),
    )


def continuation_figure(scan: ContinuationScan) -> go.Figure:
    """The same distances after each prefix, over every two tokens."""
    numbers = list(range(len(scan.prefixes)))
    curves = _curves([prefix.spacing for prefix in scan.prefixes])
    figure = _drawn(curves, numbers, "prefix")
    figure.update_traces(mode="markers")
    figure.update_xaxes(title="prefix, by its number", tickformat="d", range=[-0.5, len(numbers) - 0.5])
    figure.update_xaxes(**({"dtick": 1} if len(numbers) <= 8 else {"nticks": 8}))
    figure.update_layout(title=f"Distances of all next tokens at layer {scan.layer}")
    return figure


def _curves(spacings: Sequence[Spacing]) -> dict[str, list[float | None]]:
    quantiles = list(spacings[0].quantiles)[::-1] if spacings else []
    curves: dict[str, list[float | None]] = {
        f"{'maximum' if q == '1' else f'quantile {q}'}": [spacing.quantiles[q][0] for spacing in spacings]
        for q in quantiles
    }
    curves["closest pair that must differ"] = [spacing.margin for spacing in spacings]
    curves["noise radius"] = [spacing.noise_radius for spacing in spacings]
    return curves


def _drawn(curves: Curves, x: Sequence[str | int], what: str) -> go.Figure:
    figure, zeros = go.Figure(), Zeros(what)
    for number, (label, values) in enumerate(curves.items()):
        y, style = zeros.add(label, x, values), curve_style(number)
        figure.add_scatter(x=list(x), y=y, name=label, mode="lines+markers", **style)
    figure.update_yaxes(type="log", title="distance of last states")
    return noted(figure.update_layout(template="plotly_white", hovermode="x"), zeros.words)
