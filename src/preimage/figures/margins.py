"""The margins of a proved inversion: how far off, at each position, every other token stays."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go

from preimage.errors import OptionError
from preimage.inversion.result import Inversion


def margin_figure(result: Inversion, name: Callable[[int], str]) -> go.Figure:
    """Margin, tolerated noise and the distance that was accepted, by position; ``name`` spells a token."""
    proved = [position for position in result.positions if position.margin is not None]
    if not proved:
        raise OptionError("This inversion was not proved.", "Invert with prove=True.")
    at = [position.index for position in proved]
    told = [
        f"{name(p.token_id)!r}, nearest other {name(p.runner_up_id)!r}" if p.runner_up_id is not None else ""
        for p in proved
    ]
    curves = {
        "margin D: the nearest other token": [p.margin for p in proved],
        "tolerated noise D/2": [p.tolerated_noise for p in proved],
        "tolerance of the verifier": [p.radius for p in proved],
        "distance that was accepted": [p.distance for p in proved],
    }
    figure = go.Figure()
    for label, values in curves.items():
        figure.add_scatter(x=at, y=values, name=label, text=told, mode="lines+markers")
    figure.update_yaxes(type="log", title="distance from the state of the recovered token")
    figure.update_xaxes(title="position")
    figure.update_layout(title=f"Margins at layer {result.layer}", template="plotly_white", hovermode="x")
    return figure
