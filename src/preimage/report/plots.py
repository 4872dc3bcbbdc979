"""Figures as the page holds them: json in which every string is text, and how they look on light and dark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from textwrap import wrap
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from preimage.errors import clip
from preimage.figures.style import DASHES, NOTE, PALETTE, SYMBOLS, uncrowd
from preimage.markup import plainly

_HEIGHT = 420  # pixels, of a figure that names none
_LABELS = ("name", "text", "hovertext", "ticktext", "x", "y")  # keys of texts that are set in lines
_LINE = 36  # letters in one
_LABEL = 160  # letters in all, beyond which a label would leave no room to the figure
_OURS = ("hovertemplate", "path")  # keys of what is never a label
_KEPT = re.compile(r"&lt;(br|/?extra)&gt;")  # what is ours in a template of a hover text


@cache
def plotly_script() -> str:
    """plotly.js from the installed package, about 5 MB."""
    bundle: str = get_plotlyjs()
    return bundle.replace("\r\n", "\n")  # as a browser reads it, and so as it is hashed


class Plot(NamedTuple):
    """A figure as the page takes it: data and layout as json for a script element, and what is text there.

    ``height`` is in pixels; where a legend needs more, the page gives it.
    """

    json: str
    title: str
    note: str
    height: float


def plot_of(figure: go.Figure) -> Plot:
    """What the page takes of a figure; background, fonts and width are the page's own."""
    document = json.loads(uncrowd(go.Figure(figure)).to_json(engine="json"))
    layout = document.get("layout", {})
    title, meta = layout.pop("title", None), layout.pop("meta", None)
    for key in ("template", "paper_bgcolor", "plot_bgcolor", "width", "autosize"):
        layout.pop(key, None)
    height = float(layout.setdefault("height", _HEIGHT))
    content = _as_text({"data": document["data"], "layout": layout})
    text = title.get("text") if isinstance(title, dict) else title
    note = str(meta.get(NOTE, "")) if isinstance(meta, dict) else ""
    return Plot(script_json(content), text or "", note, height)


def script_json(content: Any) -> str:
    """Json within a script element: ascii, and with nothing in it that html would read."""
    dumped = json.dumps(content, separators=(",", ":"))
    return dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _as_text(value: Any, key: str = "") -> Any:
    """The same with every string made such that plotly, which reads some html, shows it as it is."""
    if isinstance(value, str):
        shown = plainly(value)
        if key not in _OURS:
            shown = clip(shown, _LABEL)
        if key in _LABELS:
            shown = "\n".join(_lines(shown))
        shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return _KEPT.sub(r"<\1>", shown) if key == "hovertemplate" else shown.replace("\n", "<br>")
    if isinstance(value, list):
        return [_as_text(one, key) for one in value]
    if isinstance(value, dict):
        return value if "bdata" in value else {name: _as_text(one, name) for name, one in value.items()}
    return value


def _lines(label: str) -> Iterator[str]:
    """Lines that a phone has room for; plotly would run them over the edge."""
    for line in label.split("\n"):
        yield from wrap(line, _LINE) if len(line) > _LINE else [line]


@cache
def themes() -> str:
    """Templates for light and dark, as json; the colours are those of page.css."""
    light = _template(ink="#1c2128", muted="#57606a", rule="#d9dee4", paper="#ffffff")
    dark = _template(ink="#e6e9ed", muted="#a6b0bb", rule="#353c46", paper="#14171c")
    return script_json({"light": light, "dark": dark})


def _template(ink: str, muted: str, rule: str, paper: str) -> dict[str, Any]:
    axis = {
        "automargin": True,
        "exponentformat": "power",
        "gridcolor": rule,
        "linecolor": muted,
        "zerolinecolor": muted,
        "zerolinewidth": 1,
        "tickfont": {"color": muted},
        "title": {"standoff": 12, "font": {"size": 13}},
    }
    lines = [
        {"line": {"dash": dash, "width": 2}, "marker": {"symbol": symbol, "size": 7}}
        for dash, symbol in zip(DASHES, SYMBOLS, strict=True)
    ]
    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {
            "color": ink,
            "family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif",
            "size": 13,
        },
        "colorway": list(PALETTE),
        "colorscale": {"sequential": "Cividis", "sequentialminus": "Cividis"},
        "xaxis": axis,
        "yaxis": axis,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "maxheight": 10_000,  # else it is cut, and scrolls
            "title": {"side": "top left"},
        },
        "margin": {"l": 16, "r": 16, "t": 24, "b": 16, "pad": 4},
        "hoverlabel": {"bgcolor": paper, "bordercolor": muted, "font": {"color": ink}, "align": "left"},
        "dragmode": False,  # a finger on a figure scrolls the page
    }
    heat = [{"colorscale": "Cividis", "colorbar": {"outlinewidth": 0}}]
    return {"layout": layout, "data": {"scatter": lines, "heatmap": heat}}
