"""A table or figure of a paper on a page, ours beside it."""

from __future__ import annotations

from collections.abc import Sequence

from preimage.report.opened import Opened, Summary
from preimage.report.page import Section
from preimage.report.parts import Bullets, Column, Paragraph, Part, Table
from preimage.reproduce.result import Reproduction


def summary(opened: Opened) -> Summary:
    """What was measured beside which table or figure."""
    found: Reproduction = opened.result
    measured = sum(bool(row.measured) for row in found.rows)
    headline = f"{found.title}: {measured} of {len(found.rows)} lines measured beside {found.paper}."
    return Summary(headline, [f"{row.what}: {row.verdict}" for row in found.rows if row.verdict][:10])


def sections(opened: Opened) -> list[Section]:
    """Published and measured side by side, and what has to be known."""
    found: Reproduction = opened.result
    rows = [[row.what, row.published, row.measured, row.verdict] for row in found.rows]
    table = Table(["", "published", "measured", "verdict"], rows, f"{found.title} ({found.paper})")
    said = f"Preset {found.preset}, {found.seconds:.0f} s."
    return [
        Section("Published and measured", [table, Paragraph(said)]),
        Section("What differs", [Bullets(found.differs or ("Nothing.",))]),
        Section("To be known", [Bullets(found.caveats or ("Nothing.",))]),
    ]


def compare(runs: Sequence[Opened]) -> list[Part]:
    """The same lines, measured in several runs; one table an item."""
    items: dict[str, list[Opened]] = {}
    for run in runs:
        items.setdefault(run.result.item, []).append(run)
    parts: list[Part] = []
    for item, some in items.items():
        lines: dict[str, list[str]] = {}
        for place, run in enumerate(some):
            for row in run.result.rows:
                line = lines.setdefault(row.what, [row.published, *[""] * len(some)])
                line[1 + place] = row.measured
        rows = [[what, *line] for what, line in lines.items()]
        columns: list[str | Column] = ["", "published", *(f"{run.name}: {run.about}" for run in some)]
        parts.append(Table(columns, rows, f"{some[0].result.title} ({item})"))
    return parts
