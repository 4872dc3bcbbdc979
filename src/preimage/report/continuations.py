"""Scans of all next tokens on a page: how far apart they stay after every prefix."""

from __future__ import annotations

from collections.abc import Sequence

from preimage.collisions.result import ContinuationScan
from preimage.figures.spacing import continuation_figure
from preimage.figures.style import named
from preimage.report.collisions import difference, spacing_columns, spacing_row
from preimage.report.opened import Opened, Summary
from preimage.report.page import Section
from preimage.report.parts import Column, Details, Figure, Paragraph, Part, Preformatted, Table
from preimage.report.spelling import Speller

_PREFIXES = 200  # that are told one by one
_PAIRS = 5


def summary(opened: Opened) -> Summary:
    """Whether two next tokens gave one state."""
    scan: ContinuationScan = opened.result
    if not scan.prefixes:
        return Summary("There was no prefix.", [])
    pairs = scan.prefixes[0].spacing.pairs
    what = f"{len(scan.prefixes)} prefixes, {pairs:,} pairs of next tokens after each, at layer {scan.layer}"
    margins = [one.margin for one in scan.prefixes if one.margin is not None]
    findings = [f"The nearest two states of tokens that must differ are {min(margins):.4g} apart."] * bool(
        margins
    )
    explained = {reason for one in scan.prefixes for reason in one.spacing.explained}
    findings += [
        f"Pairs within noise that the model's structure makes: {reason}." for reason in sorted(explained)
    ]
    if scan.unexplained:
        return Summary(f"{scan.unexplained:,} collisions that nothing explains: {what}.", findings, "bad")
    return Summary(f"No collision that nothing explains: {what}, all compared.", findings, "good")


def sections(opened: Opened) -> list[Section]:
    """Distances after every prefix, and the closest tokens."""
    scan: ContinuationScan = opened.result
    if not scan.prefixes:
        return []
    speller = Speller(scan.model)
    some = scan.prefixes[:_PREFIXES]
    rows = [spacing_row(str(number), one.spacing) for number, one in enumerate(some)]
    first = scan.prefixes[0].spacing
    caption = f"Every two of {first.states:,} next tokens, by prefix"
    figure = named(continuation_figure(scan), opened.about)
    margins = [f"{one.margin:.3g}" for one in some if one.margin is not None]
    parts: list[Part] = []
    for number, one in enumerate(some):
        text = one.text if one.text is not None else " ".join(map(str, one.prefix))
        closest = [difference(pair, speller) for pair in one.spacing.closest[:_PAIRS]]
        parts.append(Details(f"Prefix {number}", [Preformatted(text, "The prefix"), *closest]))
    if len(scan.prefixes) > _PREFIXES:
        parts.append(Paragraph(f"{len(scan.prefixes) - _PREFIXES:,} more are in the run folder alone."))
    return [
        Section("Distances after every prefix", [
            Figure(figure, f"Closest two tokens that must differ, by prefix: {', '.join(margins[:20])}."),
            Table(spacing_columns("prefix", first), rows, caption),
        ]),
        Section("Prefixes, and their closest next tokens", parts),
    ]  # fmt: skip


def compare(runs: Sequence[Opened]) -> list[Part]:
    """Scans side by side."""
    rows = []
    for run in runs:
        scan: ContinuationScan = run.result
        margins = [one.margin for one in scan.prefixes if one.margin is not None]
        rows.append([
            run.name, run.about, str(scan.layer), str(len(scan.prefixes)),
            f"{min(margins):.4g}" if margins else "", f"{scan.unexplained:,}",
        ])  # fmt: skip
    names = ("layer", "prefixes", "closest that must differ", "unexplained")
    return [Table(["run", "by", *(Column(name, numeric=True) for name in names)], rows, "All next tokens")]
