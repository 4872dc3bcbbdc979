"""Geometry along a training, one curve a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from preimage.figures.geometry import add_curve
from preimage.figures.style import Zeros, noted
from preimage.training.result import Checkpoint, Trajectory

BEGINNING = 0.5  # where a logarithmic axis shows step 0

_PANELS: dict[str, Callable[[Checkpoint], float]] = {
    "normalised margin, quantile:\nsmallest over layers": (
        lambda at: at.smallest("normalised_margin_quantile")[1]
    ),
    "normalised margin, quantile:\nlast layer": lambda at: at.last.normalised_margin_quantile,
    "normalised co-Lipschitz,\nquantile: smallest over layers": (
        lambda at: at.smallest("normalised_colipschitz_quantile")[1]
    ),
    "held-out loss,\nnats a token": lambda at: at.held_out_loss,
}


def trajectory_figure(shapes: Mapping[str, Trajectory], *, stacked: bool = False) -> go.Figure:
    """Normalised margins, co-Lipschitz constant and held-out loss by step; step 0 is at the left edge.

    ``stacked``: panels below one another, as a narrow screen wants them.
    """
    count = len(_PANELS)
    rows, columns = (count, 1) if stacked else (2, 2)
    figure = make_subplots(rows=rows, cols=columns, vertical_spacing=0.3 / rows)
    steps_of_all = sorted({at.step for shape in shapes.values() for at in shape.checkpoints})
    zeros = Zeros("step")
    for number, (name, shape) in enumerate(shapes.items()):
        steps = [at.step or BEGINNING for at in shape.checkpoints]
        for place, (what, quantity) in enumerate(_PANELS.items()):
            values = [quantity(at) for at in shape.checkpoints]
            row, column = 1 + place // columns, 1 + place % columns
            y = zeros.add(" ".join(what.split("\n")), [at.step for at in shape.checkpoints], values, name)
            add_curve(figure, number, name, place == 0, x=steps, y=y, row=row, col=column)
    figure.update_xaxes(title="training step", type="log", **_ticks(steps_of_all))
    for place, what in enumerate(_PANELS):
        kind = "linear" if place == count - 1 else "log"
        row, column = 1 + place // columns, 1 + place % columns
        figure.update_yaxes(type=kind, title=what, row=row, col=column)
    title = "Geometry along the training; step 0 at the left edge"
    figure.update_layout(title=title, template="plotly_white", height=300 * rows + 100)
    return noted(figure, zeros.words)


def _ticks(steps: list[int]) -> dict[str, Any]:
    """Powers of ten, the last step where it is not beside one, and where step 0 is."""
    last = max(steps, default=1)
    shown = [10**power for power in range(len(str(last))) if 10**power <= last]
    shown += [last] if shown and last > 2 * shown[-1] else []
    return {"tickvals": [BEGINNING, *shown], "ticktext": ["0", *map(str, shown)]}
