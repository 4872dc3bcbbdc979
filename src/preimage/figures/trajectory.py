"""Geometry along a training, one curve a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from preimage.figures.geometry import add_curve
from preimage.training.result import Checkpoint, Trajectory

BEGINNING = 0.5  # where a logarithmic axis shows step 0

_PANELS: dict[str, Callable[[Checkpoint], float]] = {
    "normalised margin, quantile: smallest over layers": (
        lambda at: at.smallest("normalised_margin_quantile")[1]
    ),
    "normalised margin, quantile: last layer": lambda at: at.last.normalised_margin_quantile,
    "normalised co-Lipschitz, quantile: smallest over layers": (
        lambda at: at.smallest("normalised_colipschitz_quantile")[1]
    ),
    "held-out loss, nats a token": lambda at: at.held_out_loss,
}


def trajectory_figure(shapes: Mapping[str, Trajectory]) -> go.Figure:
    """Normalised margins, co-Lipschitz constant and held-out loss by step; step 0 is at the left edge."""
    figure = make_subplots(rows=2, cols=2, subplot_titles=list(_PANELS))
    for number, (name, shape) in enumerate(shapes.items()):
        steps = [at.step or BEGINNING for at in shape.checkpoints]
        for place, quantity in enumerate(_PANELS.values()):
            y = [quantity(at) or None for at in shape.checkpoints]  # a logarithmic axis has no 0
            row, column = 1 + place // 2, 1 + place % 2
            add_curve(figure, number, name, place == 0, x=steps, y=y, row=row, col=column)
    figure.update_xaxes(title=f"training step (0 at {BEGINNING})", type="log")
    figure.update_yaxes(type="log")
    figure.update_yaxes(type="linear", row=2, col=2)
    return figure.update_layout(title="Geometry along the training", template="plotly_white", height=800)
