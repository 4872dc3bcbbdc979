"""Every part of a page as html."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import assert_never

from preimage.markup import LONG, SHORT, Markup, tag, visible
from preimage.report.parts import (
    Bullets,
    Cell,
    Column,
    Details,
    Difference,
    Facts,
    Figure,
    Heading,
    Notice,
    Paragraph,
    Part,
    Preformatted,
    Table,
    Token,
    Tokens,
    Tone,
)
from preimage.report.plots import plot_of

# What is said by a tint is said by a mark and, to who hears the page, by a word too.
_MARKS: dict[Tone, tuple[str, str]] = {"good": ("✓", "good"), "warn": ("!", "caution"), "bad": ("✕", "bad")}
_MANY_COLUMNS = 8  # beyond, paper takes smaller letters
_BRIEF = 16  # letters of a number that stay on one line, its unit included
_MOST_TOKENS = 5000
_MOST_COMPARED = 1000  # pieces of a text: comparing takes the square of it
# From which confidence a token is drawn how; the words are those of the key below the text.
_LEVELS = ((0.99, 0, "99 % or surer"), (0.9, 1, "90 to 99 %"), (0.5, 2, "50 to 90 %"), (0.0, 3, "below 50 %"))


class Drawer:
    """Draws the parts of one page, and keeps count of what needs a name within it."""

    def __init__(self) -> None:
        self._names = 0
        self.has_figures = False

    def part(self, part: Part) -> Markup:
        """One part, with those within it."""
        match part:
            case Paragraph():
                return tag("p", part.text)
            case Heading():
                return tag("h3", visible(part.text, SHORT))
            case Bullets():
                return tag("ul", *(tag("li", item) for item in part.items))
            case Notice():
                return _notice(part)
            case Table():
                return _table(part, self._name("table"))
            case Figure():
                self.has_figures = True
                return _figure(part, self._name("figure"))
            case Tokens():
                return _tokens(part)
            case Difference():
                return _difference(part)
            case Preformatted():
                label = tag("figcaption", part.label) if part.label else None
                return tag("figure", label, tag("pre", part.text), class_="text")
            case Facts():
                facts = (
                    tag("div", tag("dt", visible(key, SHORT)), tag("dd", text)) for key, text in part.facts
                )
                return tag("dl", *facts)
            case Details():
                summary = tag("summary", visible(part.summary, SHORT))
                return tag("details", summary, tag("div", *map(self.part, part.parts)))
            case _:
                assert_never(part)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"


def data_script(name: str, json: str) -> Markup:
    """Data for the scripts of the page; ``json`` is made by ``plots.script_json``."""
    return Markup(f'<script type="application/json" id="{name}">{json}</script>')


def _mark(tone: Tone) -> Markup | None:
    if tone == "plain":
        return None
    sign, word = _MARKS[tone]
    return tag("span", sign, class_="mark", role="img", aria_label=word)


def _notice(notice: Notice) -> Markup:
    verdict = tag("p", _mark(notice.tone), tag("strong", notice.title))
    text = tag("p", notice.text) if notice.text else None
    return tag("div", verdict, text, class_=f"notice {notice.tone}", role="note")


def _table(table: Table, name: str) -> Markup:
    columns = [one if isinstance(one, Column) else Column(one) for one in table.columns]
    head = tag("tr", *(_head_cell(one) for one in columns))
    rows = [tag("tr", *_cells(row, columns, table.row_headers)) for row in table.rows]
    body = rows or [tag("tr", tag("td", "none", colspan=str(len(columns))))]
    drawn = tag(
        "table",
        tag("caption", tag("span", table.caption), id=name),
        tag("thead", head),
        tag("tbody", *body),
        class_="many" if len(columns) > _MANY_COLUMNS else None,
    )
    return tag("div", drawn, class_="wide", role="region", aria_labelledby=name, tabindex="0")


def _head_cell(column: Column) -> Markup:
    return tag("th", visible(column.name, SHORT), scope="col", class_="number" if column.numeric else None)


def _cells(row: Sequence[str | Cell], columns: Sequence[Column], row_headers: bool) -> list[Markup]:
    drawn = []
    for index, (given, column) in enumerate(zip(row, columns, strict=True)):
        cell = given if isinstance(given, Cell) else Cell(given)
        classes = [cell.tone] * (cell.tone != "plain") + ["number"] * column.numeric
        if column.numeric and len(cell.text) <= _BRIEF:
            classes.append("brief")
        heads = row_headers and index == 0
        drawn.append(
            tag(
                "th" if heads else "td",
                _mark(cell.tone),
                cell.text,
                tag("span", cell.note, class_="note") if cell.note else None,
                scope="row" if heads else None,
                class_=" ".join(classes) or None,
            )
        )
    return drawn


def _figure(part: Figure, name: str) -> Markup:
    plot = plot_of(part.figure)
    unseen = Markup(f"<noscript>{tag('p', part.alternative)}</noscript>")
    size, said = f"height: {plot.height:g}px", part.caption or plot.note
    return tag(
        "figure",
        tag("p", visible(plot.title, SHORT), class_="title") if plot.title else None,
        tag("div", unseen, class_="plot", id=name, role="img", aria_label=part.alternative, style=size),
        tag("figcaption", " ".join(filter(None, (part.caption, plot.note)))) if said else None,
        data_script(f"{name}-data", plot.json),
    )


def _tokens(part: Tokens) -> Markup:
    shown = part.tokens[:_MOST_TOKENS]
    levels = {_level(token) for token in shown}
    keys = [tag("span", words, class_=f"t c{level}") for _, level, words in _LEVELS if level in levels]
    if None in levels:
        keys.append(tag("span", "not read", class_="t c9"))
    left_out = len(part.tokens) - len(shown)
    rest = tag("span", f" […] {left_out:,} more tokens are not shown", class_="odd") if left_out else None
    return tag(
        "figure",
        tag("figcaption", part.label),
        tag("p", *map(_token, shown), rest, class_="tokens"),
        tag("p", "How sure: ", *keys, class_="key") if keys else None,
        class_="text",
    )


def _difference(part: Difference) -> Markup:
    first, second = list(part.first[:_MOST_COMPARED]), list(part.second[:_MOST_COMPARED])
    lines: tuple[list[Markup], list[Markup]] = ([], [])
    differ = 0
    for kind, one, two, three, four in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        for line, some in zip(lines, (first[one:two], second[three:four]), strict=True):
            text = _ended("".join(some))
            if text:
                line.append(text if kind == "equal" else tag("mark", text))
        differ += kind != "equal"
    said = f"{part.label}. {'1 place differs' if differ == 1 else f'{differ} places differ'}, marked."
    return tag(
        "figure",
        tag("figcaption", said),
        *(tag("p", *line, class_="tokens") for line in lines),
        class_="text",
    )


def _ended(text: str, most: int = LONG) -> Markup:
    """A text whose line ends and tabs are seen."""
    shown = visible(text, most)
    return Markup(
        shown.replace("\n", '<span class="odd">↵</span>\n').replace("\t", '<span class="odd">⇥</span>\t')
    )


def _level(token: Token) -> int | None:
    if token.confidence is None:
        return None
    return next((level for least, level, _ in _LEVELS if token.confidence >= least), _LEVELS[-1][1])


def _token(token: Token) -> Markup:
    level = _level(token)
    told = ", ".join(filter(None, (_percent(token.confidence), token.note)))
    text = _ended(token.text, SHORT) if token.text else tag("span", "(empty)", class_="odd")
    kind = f"t c{9 if level is None else level}"
    if level == 0 or (level is None and not token.note):
        return tag("span", text, class_=kind, title=told)
    return tag("span", text, tag("span", told, class_="tip"), class_=kind, tabindex="0")


def _percent(confidence: float | None) -> str:
    """Never 100 % of what is not certain, never 0 % of what is not impossible."""
    if confidence is None:
        return "not read"
    if 0.999 <= confidence < 1:
        return "over 99.9 %"
    if 0 < confidence < 0.001:
        return "under 0.1 %"
    return f"{100 * confidence:.3g} %"
