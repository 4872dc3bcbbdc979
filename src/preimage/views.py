"""What a notebook shows of a result: a little html, without scripts or style sheets.

All of its look stands in the elements themselves and is half transparent, so that it suits light and dark
notebooks and outlives the cleaning that notebooks of others go through. Whatever a text holds is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from preimage.markup import SHORT, Markup, joined, plainly, tag, visible

Tone: TypeAlias = Literal["plain", "good", "warn", "bad"]

_MARKS: dict[Tone, str] = {"plain": "", "good": "✓ ", "warn": "! ", "bad": "✕ "}
_TINTS: dict[Tone, str] = {
    "plain": "127,127,127,.5", "good": "0,158,115,.9", "warn": "214,144,0,.9", "bad": "213,94,0,.9",
}  # fmt: skip
# From which confidence a token is drawn how: the less sure, the more it stands out; not by colour alone.
_LEVELS = (
    (0.99, ""),
    (0.9, "border-bottom:2px dotted rgba(213,94,0,.7)"),
    (0.5, "background:rgba(214,144,0,.3);border-bottom:2px dashed rgba(213,94,0,.8)"),
    (0.0, "background:rgba(213,94,0,.4);border-bottom:2px solid rgba(213,94,0,1)"),
)
_MOST_TOKENS, _MOST_ROWS = 1000, 60
_CELL = "padding:2px 10px 2px 0;vertical-align:top;text-align:"


class Piece(NamedTuple):
    """A token as text, how sure it is (None: nothing is known), and what is told of it when pointed at."""

    text: str
    confidence: float | None
    told: str


class Shown:
    """A result as a notebook shows it, and its first line as a terminal does.

    Whoever inherits says the line (:meth:`_line`), its tone, and what stands below it (:meth:`_parts`).
    """

    def __repr__(self) -> str:
        return f"<{plainly(self._line(), 4 * SHORT)}>".translate({9: "␉", 10: "␊"})

    def _repr_html_(self) -> str:
        return view(self._line(), *self._parts(), tone=self._tone())

    def _line(self) -> str:
        raise NotImplementedError

    def _tone(self) -> Tone:
        return "plain"

    def _parts(self) -> Iterable[Markup | None]:
        raise NotImplementedError


def view(line: str, *parts: Markup | None, tone: Tone = "plain") -> str:
    """A line in bold and parts below it, as one element; the tone is a mark and a stripe at its side."""
    style = f"border-left:4px solid rgba({_TINTS[tone]});padding:2px 0 2px 12px;margin:4px 0;max-width:100%"
    bold = tag("div", _text(_MARKS[tone] + line, 4 * SHORT), style="font-weight:600")
    # nor is what stands between two dollars typeset as a formula
    return str(tag("div", bold, *parts, class_="tex2jax_ignore mathjax_ignore", style=style))


def words(text: str) -> Markup:
    """A paragraph."""
    return tag("div", _text(text, 4 * SHORT), style="margin:4px 0;white-space:pre-wrap;max-width:60em")


def details(summary: str, *parts: Markup | None) -> Markup:
    """Parts that are shown when asked for."""
    return tag("details", tag("summary", _text(summary), style="cursor:pointer"), *parts)


def table(rows: Sequence[Mapping[str, Any]], caption: str = "", columns: Sequence[str] = ()) -> Markup:
    """Flat rows under the names of their columns, those of the first row where none are chosen.

    Numbers to four digits; no more rows than can be looked over: :meth:`to_dataframe` has the rest.
    """
    chosen = list(columns or (rows[0] if rows else ()))
    numeric = {name for name in chosen if all(_is_number(row.get(name)) for row in rows[:_MOST_ROWS])}
    sides = {name: f"{_CELL}{'right' if name in numeric else 'left'}" for name in chosen}
    head = (tag("th", _text(name.replace("_", " ")), scope="col", style=sides[name]) for name in chosen)
    body = (
        tag("tr", *(tag("td", _text(_cell(name, row.get(name))), style=sides[name]) for name in chosen))
        for row in rows[:_MOST_ROWS]
    )
    left = len(rows) - _MOST_ROWS
    drawn = tag(
        "table",
        tag("caption", _text(caption), style="text-align:left;caption-side:top") if caption else None,
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        style="border-collapse:collapse;margin:4px 0",
    )
    more = words(f"… {left:,} more rows, all of them in to_dataframe()") if left > 0 else None
    return tag("div", drawn, more, style="overflow-x:auto;max-width:100%")


def tokens(pieces: Sequence[Piece]) -> Markup:
    """A text as its tokens: the less sure one is, the more it stands out; pointed at, it is told of."""
    left = len(pieces) - _MOST_TOKENS
    style = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;margin:6px 0;max-width:80em"
    rest = _text(f" […] {left:,} more tokens") if left > 0 else None
    return tag("div", *map(_token, pieces[:_MOST_TOKENS]), rest, style=style)


def number(value: Any) -> str:
    """A value as a table has it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def named(model: Mapping[str, Any]) -> str:
    """A model by what its identity says."""
    return f"{model.get('name', 'an unnamed model')}, {model.get('dtype', 'of some type')}"


def percent(share: float) -> str:
    """Never 100 % of what is not certain, never 0 % of what is not impossible."""
    if 0.999 <= share < 1:
        return "over 99.9 %"
    if 0 < share < 0.001:
        return "under 0.1 %"
    return f"{100 * share:.3g} %"


def _token(piece: Piece) -> Markup:
    known = piece.confidence is not None
    look = next((look for least, look in _LEVELS if (piece.confidence or 0) >= least), _LEVELS[-1][1])
    told = ", ".join(filter(None, (f"{percent(piece.confidence or 0)} sure" if known else "", piece.told)))
    text = _text(piece.text) if piece.text else tag("span", "(empty)", style="opacity:.6")
    # where one token ends and the next begins; a line break is seen, and breaks the line
    text = Markup(text.replace("\n", '<span style="opacity:.6">↵</span>\n'))
    edge = "border-right:1px solid rgba(127,127,127,.35)"
    return tag("span", text, title=told or None, style=";".join(filter(None, (edge, look if known else ""))))


def _text(text: str, most: int = SHORT) -> Markup:
    """Text of which every character is seen; what had to be spelled out is paler."""
    return Markup(joined(visible(text, most)).replace('class="odd"', 'style="opacity:.6"'))


def _cell(name: str, value: Any) -> str:
    """A value in a column; what is a name, not an amount, has no commas."""
    return str(value) if name.endswith("id") and value is not None else number(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
