"""A table or figure of a paper, and the same measured here. Readable without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from preimage.markup import Markup
from preimage.storage import Saved, dataframe
from preimage.views import Shown, details, table, words

Measured: TypeAlias = "tuple[list[Row], dict[str, Any]]"  # lines, and everything behind them


@dataclass(frozen=True)
class Row:
    """One line: what it is about, the published figure as it stands there, ours, and the numbers behind it.

    ``published`` is empty where the paper has none, ``measured`` where this was not run; ``verdict`` says in
    a few words what the two have to do with one another.
    """

    what: str
    published: str
    measured: str
    values: dict[str, float | None]
    verdict: str = ""


@dataclass(frozen=True, repr=False)
class Reproduction(Saved, Shown):
    """One item of a paper beside what was measured.

    ``differs``: what of the set-up is not the paper's. ``caveats``: what has to be known to read the numbers.
    ``raw``: whatever was measured, whole. ``record``: versions, machine, date, command, commit.
    """

    _kind = "reproduction"

    item: str
    paper: str
    title: str
    preset: str
    model: dict[str, Any]
    options: dict[str, Any]
    rows: tuple[Row, ...]
    differs: tuple[str, ...]
    caveats: tuple[str, ...]
    raw: dict[str, Any]
    seconds: float
    record: dict[str, Any]

    @property
    def table(self) -> list[dict[str, Any]]:
        """One flat row a line, for tables."""
        return [
            {"what": row.what, "published": row.published, "measured": row.measured, "verdict": row.verdict}
            for row in self.rows
        ]

    def markdown(self) -> str:
        """The table with what belongs to it, as docs/results has it."""
        lines = [f"| {self.title} | published | measured | |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(row.what)} | {_cell(row.published)} | {_cell(row.measured)} | {_cell(row.verdict)} |"
            for row in self.rows
        ]
        for title, texts in (("What differs", self.differs), ("To be known", self.caveats)):
            lines += ["", f"{title}:", "", *(f"- {text}" for text in texts)] if texts else []
        return "\n".join(lines) + "\n"

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a line."""
        return dataframe(self.table)

    def _line(self) -> str:
        return f"{self.title} ({self.paper}), preset {self.preset}, {self.seconds:.0f} s"

    def _parts(self) -> Iterable[Markup]:
        yield table(self.table)
        for title, texts in (("What differs", self.differs), ("To be known", self.caveats)):
            if texts:
                yield details(title, *map(words, texts))


def spread(values: Iterable[float], unit: str = "") -> str:
    """Mean and standard deviation, as the papers write them; empty without values.

    >>> spread([1.0, 3.0], "s")
    '2 ± 1.4 s'
    """
    some = list(values)
    if not some:
        return ""
    mean = sum(some) / len(some)
    text = f"{mean:.4g}"
    if len(some) > 1:
        text += f" ± {math.sqrt(sum((one - mean) ** 2 for one in some) / (len(some) - 1)):.2g}"
    return f"{text} {unit}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
