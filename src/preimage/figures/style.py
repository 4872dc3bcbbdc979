"""What all figures have in common: colours, ticks, titles, and what a logarithmic axis cannot show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import plotly.graph_objects as go

from preimage.storage import record

# Told apart by people who do not see all colours, and at least 3:1 against a page on light and on dark.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#bf6a99", "#b07d00", "#2f8fc6", "#7f7f7f")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
NOTE = "note"  # in a figure's meta: what belongs below it, in words
_LABELS = 8  # on an axis of layers: a phone has room for no more
_COMMIT = 10  # letters of a commit that are shown
_WIDTH = 1200  # pixels of a figure for print
_LINE, _TITLE = 150, 110  # letters of a note's and of a title's line in that width
_LETTER, _KEY = 7, 60  # pixels of a letter of a legend, and of what stands around a name
_SHORT, _DECADES = 0.7, 2.0  # of a logarithmic axis: up to which its labels are 3, 4, 5 or 10, 20, 50
_NAME = 48  # letters of a name in one line


def made_by(model: Mapping[str, Any] | None, commit: str | None) -> str:
    """Model, dtype and commit as every title has them.

    >>> made_by({"name": "smollm2", "dtype": "float32"}, "0123456789abcdef+")
    'smollm2, float32, commit 0123456789+'
    """
    known = [str(model[key]) for key in ("name", "dtype") if model.get(key)] if model else []
    known[:1] = [PurePath(known[0]).name or known[0]] if known and known[0][:1] in "/.~" else known[:1]
    return ", ".join([*(known or ["no model known"]), brief_commit(commit)])


def made_now(*models: Mapping[str, Any] | None) -> str:
    """The same of what this process made of one model or several."""
    commit = record(command=False)["commit"]
    told = dict.fromkeys(made_by(model, None).rpartition(", ")[0] for model in models)
    return ", ".join([*told, brief_commit(commit)])


def brief_commit(commit: str | None) -> str:
    """A commit's first letters, and the + that says that the sources were changed."""
    return f"commit {commit[:_COMMIT]}{'+' * commit.endswith('+')}" if commit else "commit not known"


def named(figure: go.Figure, about: str) -> go.Figure:
    """The figure with who made it behind its title."""
    title = figure.layout.title.text
    return figure.update_layout(title={"text": f"{title} · {about}" if title else about}) if about else figure


# The scale of a map, narrow: what it measures stands in the title.
COLOUR_BAR = {"thickness": 10, "xpad": 4, "nticks": 6, "outlinewidth": 0}


def curve_style(number: int) -> dict[str, Any]:
    """Colour, dash and symbol of the curve of this number: any one of them tells it from the others."""
    at = number % len(PALETTE)
    return {
        "line": {"color": PALETTE[at], "dash": DASHES[at], "width": 2},
        "marker": {"symbol": SYMBOLS[at], "size": 7},
    }


def layer_axis(layers: Sequence[object]) -> dict[str, Any]:
    """An axis of layers, labelled as often as there is room for, its last one always."""
    names = [str(layer) for layer in layers]
    every = -(-len(names) // _LABELS)
    shown = [name for at, name in enumerate(names[:-1]) if at % every == 0 and len(names) - 1 - at >= every]
    return {"title": "layer", "type": "category", "tickvals": [*shown, *names[-1:]]}


class Zeros:
    """Values that are 0, and so not on a logarithmic axis: collected curve by curve, said in one sentence.

    >>> zeros = Zeros("layer")
    >>> _ = zeros.add("margin", [0, 1, 2, "final"], [0.0, 0.0, 2.0, 0.0])
    >>> zeros.words
    'Exactly 0, which a logarithmic axis cannot show: margin at layer 0 to 1, final.'
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._found: dict[str, dict[str, list[str]]] = {}  # quantity: where: curves
        self._curves: dict[str, int] = {}  # quantity: how many curves

    def add(
        self, quantity: str, at: Sequence[object], values: Sequence[float | None], curve: str = ""
    ) -> list[float | None]:
        """Note the zeros of a curve; the values that can be drawn."""
        where = [index for index, value in enumerate(values) if value == 0]
        self._curves[quantity] = self._curves.get(quantity, 0) + 1
        if where:
            said = "everywhere" if len(where) == len(values) else f"at {self._what} {_ranges(where, at)}"
            self._found.setdefault(quantity, {}).setdefault(said, []).append(curve)
        return [value or None for value in values]

    @property
    def words(self) -> str:
        """The sentence; empty where nothing is 0."""
        said = [
            f"{quantity} {where}" if len(curves) == self._curves[quantity]
            else f"{quantity} of {', '.join(curves)} {where}"
            for quantity, places in self._found.items()
            for where, curves in places.items()
        ]  # fmt: skip
        return f"Exactly 0, which a logarithmic axis cannot show: {'; '.join(said)}." if said else ""


def noted(figure: go.Figure, *notes: str) -> go.Figure:
    """The figure with sentences that belong below it."""
    before = (figure.layout.meta or {}).get(NOTE, "")
    text = " ".join(filter(None, (before, *notes)))
    return figure.update_layout(meta={NOTE: text}) if text else figure


def laid_out(figure: go.Figure, about: str = "") -> go.Figure:
    """A figure as it is saved by itself: everything in it has its room, whatever its names are."""
    figure = named(go.Figure(figure), about)
    layout = figure.layout
    title = (layout.title.text or "").replace("<br>", " ")
    title_lines = textwrap.wrap(title, _TITLE)
    names = [_wrapped(name) for name in _legend(figure)]
    columns = max(1, (_WIDTH - 120) // (_KEY + _LETTER * max(map(_widest, names), default=1)))
    rows = -(-len(names) // columns) * max((name.count("<br>") + 1 for name in names), default=1)
    note = textwrap.wrap((layout.meta or {}).get(NOTE, ""), _LINE)
    legend_height, note_height = 22 * rows + 10 if len(names) else 0, 18 * len(note)
    top, bottom = 50 + 24 * len(title_lines), 70 + legend_height + note_height
    height = (layout.height or 340 + top + 70) - 50 + legend_height + note_height + 24 * len(title_lines)
    for trace in figure.data:
        trace.name = trace.name and _wrapped(trace.name)
    figure.update_layout(
        template=figure.layout.template if layout.template.layout.font.family else "plotly_white",
        title={"text": "<br>".join(title_lines), "x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top",
               "yref": "container", "pad": {"t": 16}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "yanchor": "bottom",
                "y": (note_height + 8) / height, "maxheight": 10_000},
        margin={"l": 80, "r": 40, "t": top, "b": bottom, "autoexpand": True},
        width=None, height=height,
    )  # fmt: skip
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        axis.title.text = axis.title.text and axis.title.text.replace("\n", "<br>")
        axis.automargin, axis.exponentformat = True, "power"
    uncrowd(figure)
    if note:
        figure.add_annotation(
            text="<br>".join(note), showarrow=False, align="left", x=0, xref="paper", xanchor="left",
            y=0, yref="paper", yanchor="bottom", yshift=4 - bottom, font={"size": 12},
        )  # fmt: skip
    return figure


def uncrowd(figure: go.Figure) -> go.Figure:
    """The figure with logarithmic axes labelled by decades, by 1, 2, 5, or, where it is short, by its own."""
    for axes, side in ((figure.select_xaxes(), "x"), (figure.select_yaxes(), "y")):
        for axis in axes:
            if axis.type != "log" or any(one is not None for one in (axis.dtick, axis.tickvals, axis.nticks)):
                continue
            name = axis.plotly_name.replace("axis", "")
            values = [
                float(value)
                for trace in figure.data
                if (getattr(trace, f"{side}axis", None) or side) == name
                for value in _listed(getattr(trace, side, None))
                if isinstance(value, int | float) and value > 0
            ]
            decades = math.log10(max(values) / min(values)) if values else 0.0
            if decades < _SHORT:
                axis.nticks = 4
            else:
                axis.dtick = "D2" if decades < _DECADES else max(1, round(decades / 5))
    return figure


def _listed(values: Any) -> Sequence[Any]:
    return () if values is None else list(values)


def _legend(figure: go.Figure) -> list[str]:
    """The names that its legend shows."""
    shown = [trace for trace in figure.data if trace.name and trace.showlegend is not False]
    several = len(figure.data) > 1 or any(trace.showlegend for trace in shown)
    return [trace.name for trace in shown] if several and figure.layout.showlegend is not False else []


def _wrapped(name: str) -> str:
    return "<br>".join(textwrap.wrap(name, _NAME)) or name


def _widest(name: str) -> int:
    return max(map(len, name.split("<br>")))


def _ranges(where: Sequence[int], at: Sequence[object]) -> str:
    """Neighbours as one: 0 to 3, 7."""
    runs: list[list[int]] = []
    for index in where:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{at[run[0]]} to {at[run[-1]]}" if len(run) > 1 else f"{at[run[0]]}" for run in runs)
