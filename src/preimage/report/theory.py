"""Verdicts of the theory on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from preimage.report.opened import Opened, Summary, flat
from preimage.report.page import Section
from preimage.report.parts import Cell, Column, Details, Facts, Part, Table, Tone
from preimage.theory.result import TheoryReport, Verdict

_ROWS = 200  # of one table behind verdicts


def summary(opened: Opened) -> Summary:
    """Which statements hold."""
    verdicts = [one for report in opened.result for one in report.verdicts]
    refuted = [one for report in opened.result for one in report.refuted]
    undecided = [one for one in verdicts if one.holds is None]
    holding = sum(one.holds is True for one in verdicts)
    headline = f"{holding} of {len(verdicts)} statements hold"
    if undecided:
        headline += f", {len(undecided)} are undecided"
    findings = [f"Does not hold: {one.statement}" for one in refuted]
    tone: Tone = "bad" if refuted else "warn" if undecided else "good"
    return Summary(f"{headline}.", findings, tone)


def sections(opened: Opened) -> list[Section]:
    """Every check: its verdicts, what they do not show, the numbers behind them."""
    return [_check(report) for report in opened.result]


def compare(runs: Sequence[Opened]) -> list[Part]:
    """The verdicts of several runs, a row a statement."""
    held: dict[str, dict[str, str]] = {}
    for run in runs:
        for report in run.result:
            for one in report.verdicts:
                held.setdefault(one.statement, {})[run.name] = _held(one).text
    names = [run.name for run in runs]
    rows: list[list[str | Cell]] = [
        [statement, *(by.get(name, "") for name in names)] for statement, by in held.items()
    ]
    return [Table(["statement", *names], rows, "Whether it holds")]


def _check(report: TheoryReport) -> Section:
    rows: list[list[str | Cell]] = [
        [one.statement, _held(one), _number(one.value), _number(one.bound), one.not_shown]
        for one in report.verdicts
    ]
    columns: list[str | Column] = [
        "statement",
        "holds",
        Column("measured", numeric=True),
        Column("bound", numeric=True),
        "what it does not show",
    ]
    parts: list[Part] = [Table(columns, rows, "Verdicts")]
    parts += [
        Details(name.replace("_", " ").capitalize(), [_rows(name, some)])
        for name, some in report.tables.items()
        if some
    ]
    parts.append(Details("On what", [Facts([(name, flat(value)) for name, value in report.subject.items()])]))
    return Section(f"The check of {report.check}", parts)


def _held(verdict: Verdict) -> Cell:
    if verdict.holds is None:
        return Cell("undecided", "warn")
    if verdict.descriptive:
        return Cell("yes" if verdict.holds else "no", "plain", "the theory allows either")
    return Cell("yes", "good") if verdict.holds else Cell("NO", "bad")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _rows(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of whatever fields its rows have."""
    columns = list(dict.fromkeys(field for row in rows for field in row))
    shown = [[_cell(row.get(field)) for field in columns] for row in rows[:_ROWS]]
    rest = f"; {len(rows) - _ROWS:,} rows more are in the file alone" if len(rows) > _ROWS else ""
    numeric = {
        field: all(isinstance(row.get(field), int | float | None) for row in rows) for field in columns
    }
    heads = [Column(field.replace("_", " "), numeric=numeric[field]) for field in columns]
    return Table(heads, shown, f"{name.replace('_', ' ').capitalize()}{rest}", row_headers=False)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else flat(value)
