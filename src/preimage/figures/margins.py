"""Margins of an inversion: how far off, at each position, other tokens stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from preimage.errors import OptionError
from preimage.figures.style import Zeros, curve_style, noted
from preimage.inversion.result import Inversion, Position


def margin_figure(result: Inversion, name: Callable[[int], str]) -> go.Figure:
    """Margin, tolerated noise and the distance that was accepted, by position; ``name`` spells a token."""
    proved = [position for position in result.positions if position.margin is not None]
    if not proved:
        raise OptionError("This inversion was not proved.", "Invert with prove=True.")
    curves = {
        "margin D: the nearest other token": [p.margin for p in proved],
        "tolerated noise D/2": [p.tolerated_noise for p in proved],
    }
    return _drawn(result, proved, curves, name, f"Margins at layer {result.layer}")


def distance_figure(result: Inversion, name: Callable[[int], str]) -> go.Figure:
    """The same of an inversion that was not proved: the nearest of the other tokens that were tried."""
    seen = list(result.positions)
    curves = {"nearest other token that was tried": [p.runner_up_distance for p in seen]}
    return _drawn(result, seen, curves, name, f"Distances at layer {result.layer}")


def _drawn(
    result: Inversion,
    positions: Sequence[Position],
    others: dict[str, list[float | None]],
    name: Callable[[int], str],
    title: str,
) -> go.Figure:
    at = [position.index for position in positions]
    told = [
        f"{name(p.token_id)!r}" + (f", nearest other {name(p.runner_up_id)!r}" if p.runner_up_id else "")
        for p in positions
    ]
    curves: dict[str, list[float | None]] = others | {
        "tolerance of the verifier": [p.radius for p in positions],
        "distance that was accepted": [p.distance if p.accepted else None for p in positions],
    }
    refused: list[float | None] = [None if p.accepted else p.distance for p in positions]
    if any(value is not None for value in refused):
        curves["distance of the nearest token, not accepted"] = refused
    figure, zeros = go.Figure(), Zeros("position")
    for number, (label, values) in enumerate(curves.items()):
        y, style = zeros.add(label, at, values), curve_style(number)
        figure.add_scatter(x=at, y=y, name=label, text=told, mode="lines+markers", **style)
    figure.update_yaxes(type="log", title="distance from the state")
    figure.update_xaxes(title="position", tickformat="d", nticks=8)
    figure.update_layout(title=title, template="plotly_white", hovermode="x")
    return noted(figure, zeros.words)
