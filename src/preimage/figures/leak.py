"""What leaks, drawn: the table as a map, and defences against what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from preimage.figures.style import COLOUR_BAR, PALETTE
from preimage.layers import Layer
from preimage.leak.result import LeakAudit, LeakCell

_STRENGTH = {
    "noise": "white noise, % of a state's length",
    "lowrank": "noise in a secret eighth of the directions, % of a state's length",
    "clipped": "lengths cut to the median, then noise, % of it",
    "cut": "coordinates kept, %",
    "every": "one position kept in so many",
}


def leak_map(audit: LeakAudit) -> go.Figure:
    """The share of tokens read, by exposure and layer."""
    layers = [str(layer) for layer in audit.layers]
    exposures = list(audit.exposures)[::-1]  # the first on top
    shares: list[list[float | None]] = []
    for exposure in exposures:
        cells = (audit.at(exposure, layer) for layer in audit.layers)
        shares.append([None if cell is None or not cell.tried else 100 * cell.tokens for cell in cells])
    figure = go.Figure(
        go.Heatmap(
            z=shares, x=layers, y=exposures, zmin=0, zmax=100, colorscale="Cividis", xgap=2, ygap=2,
            texttemplate="%{z:.0f}", hovertemplate="%{y}, layer %{x}: %{z:.1f} %<extra></extra>",
            colorbar=COLOUR_BAR,
        )
    )  # fmt: skip
    figure.update_xaxes(title="layer", type="category")
    figure.update_yaxes(title="what was seen", type="category", automargin=True)
    figure.update_layout(title=_title(audit, "Tokens read, %"), height=140 + 34 * len(exposures))
    return figure


def defence_figure(audit: LeakAudit, family: str) -> go.Figure:
    """Tokens read and next tokens changed against the strength of a defence, a colour a layer.

    Where margins were measured, a dotted line for each layer shows the share of positions that D/2 secures:
    noise shorter than half the distance to the nearest other token's state.
    """
    figure = go.Figure()
    for number, layer in enumerate(audit.layers):
        curve = audit.curve(family, layer)
        if len(curve) < 2:
            continue
        strengths = [_value(cell) for cell in curve]
        colour = PALETTE[number % len(PALETTE)]
        read = [100 * cell.tokens if cell.tried else None for cell in curve]
        figure.add_scatter(
            x=strengths, y=read, name=f"layer {layer}: tokens read", mode="lines+markers",
            line={"color": colour},
        )  # fmt: skip
        changed = [None if cell.utility is None else 100 * cell.utility.top1_changed for cell in curve]
        if any(one is not None for one in changed):
            figure.add_scatter(
                x=strengths, y=changed, name=f"layer {layer}: next tokens changed", mode="lines+markers",
                line={"color": colour, "dash": "dash"}, marker={"symbol": "x"},
            )  # fmt: skip
        secured = _secured(audit, layer, strengths) if family == "noise" else None
        if secured is not None:
            figure.add_scatter(
                x=strengths, y=secured, name=f"layer {layer}: positions D/2 secures for the reader",
                mode="lines", line={"color": colour, "dash": "dot"},
            )  # fmt: skip
    figure.update_xaxes(title=_STRENGTH.get(family, family), type="linear" if family == "every" else "log")
    figure.update_yaxes(title="share of tokens or positions, %", range=[-3, 103])
    figure.update_layout(title=_title(audit, f"{family}: what it hides, and what it costs"), height=460)
    return figure


def _secured(audit: LeakAudit, layer: Layer, percents: Sequence[float]) -> list[float] | None:
    margins = audit.margins.get(layer)
    if not margins:
        return None
    return [
        100 * sum(percent / 100 < margin / 2 for margin in margins) / len(margins) for percent in percents
    ]


def _value(cell: LeakCell) -> float:
    return float(cell.exposure.partition(":")[2])


def _title(audit: LeakAudit, what: str) -> str:
    return f"{what}; {audit.prompts:,} prompts"
