"""How far apart the states of a set of prompts are, layer by layer."""

from __future__ import annotations

import plotly.graph_objects as go

from preimage.collisions.result import CollisionAudit


def spacing_figure(audit: CollisionAudit) -> go.Figure:
    """Closest pair, quantiles and noise radius of all pairs, and the closest hard pair, by layer."""
    layers = [str(layer.layer) for layer in audit.layers]
    spacings = [layer.spacing for layer in audit.layers]
    curves: dict[str, list[float | None]] = {
        f"{'maximum' if q == '1' else f'quantile {q}'}": [spacing.quantiles[q][0] for spacing in spacings]
        for q in reversed(spacings[0].quantiles)
    }
    curves["closest pair that must differ"] = [spacing.margin for spacing in spacings]
    curves["closest hard pair that must differ"] = [
        min((kind.margin for kind in layer.hard if kind.margin is not None), default=None)
        for layer in audit.layers
    ]
    curves["noise radius"] = [spacing.noise_radius for spacing in spacings]
    figure = go.Figure()
    for label, values in curves.items():
        shown = [value if value else None for value in values]  # a logarithmic axis has no 0
        figure.add_scatter(x=layers, y=shown, name=label, mode="lines+markers")
    figure.update_yaxes(type="log", title="distance of last states")
    figure.update_xaxes(title="layer", type="category")
    figure.update_layout(
        title=f"All pairs of {audit.prompts} prompts", template="plotly_white", hovermode="x"
    )
    return figure
