"""The page of an audit of what leaks: the verdict, the table, how it was found, what was not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from preimage.figures.leak import defence_figure, leak_map
from preimage.figures.style import named
from preimage.leak.result import FilesAudit, LeakAudit, LeakCell
from preimage.leak.verdict import READ, SAFE, Verdict, curves, judge, judge_files
from preimage.report.opened import Opened, Summary, provenance
from preimage.report.page import Page, Section
from preimage.report.parts import (
    Bullets,
    Cell,
    Column,
    Details,
    Facts,
    Figure,
    Paragraph,
    Part,
    Preformatted,
    Table,
    Tone,
)

_TEXTS = 200  # prompts of files whose text is shown
_COSTS = (
    "exposure",
    "layer",
    "read whole",
    "verified",
    "tokens read",
    "sure and right",
    "passes",
    "s a prompt",
)
Record = Mapping[str, Any]


def leak_page(audit: LeakAudit, record: Record, command: str = "") -> Page:
    """The page of an audit of prompts. ``record``: who made it (:func:`preimage.storage.record`)."""
    opened = Opened("", audit._kind, audit, (audit.model,), (record,), audit.options)
    return _page(f"What leaks from {audit.model['name']}", opened, summary, sections, command)


def files_page(audit: FilesAudit, record: Record, command: str = "") -> Page:
    """The page of an audit of files."""
    opened = Opened("", audit._kind, audit, (audit.model,) if audit.model else (), (record,))
    return _page("What these files give away", opened, files_summary, files_sections, command)


def _page(
    title: str,
    opened: Opened,
    summed_up: Callable[[Opened], Summary],
    told: Callable[[Opened], list[Section]],
    command: str,
) -> Page:
    chapters = [
        Section("Verdict", summed_up(opened).parts),
        *told(opened),
        Section("Where this comes from", provenance(opened, command)),
    ]
    return Page(title, f"{subtitle(opened)}; {opened.about}", chapters)


def subtitle(opened: Opened) -> str:
    """Of what an audit is, in a line."""
    audit: LeakAudit | FilesAudit = opened.result
    if isinstance(audit, FilesAudit):
        by = "read with a model" if audit.model else "read without a model"
        return f"{', '.join(audit.paths)[:200]}, {by}"
    layers = ", ".join(map(str, audit.layers))
    return f"{audit.prompts:,} prompts of {_lengths(audit.lengths)} tokens ({audit.source}), layers {layers}"


def summary(opened: Opened) -> Summary:
    """The verdict on an audit of prompts."""
    return _summary(judge(opened.result))


def sections(opened: Opened) -> list[Section]:
    """What can be read, what would stop it, how it was found, and what was not tried."""
    audit: LeakAudit = opened.result
    verdict, about = judge(audit), opened.about
    found = [Section("What can be read", _table(audit, about))]
    defended = list(dict.fromkeys(family for family, _, _ in curves(audit)))
    if defended:
        prices = [_curve(audit, family, about) for family in defended]
        found.append(Section("Defences and their price", prices))
    return [
        *found,
        Section("What to do", [Bullets(verdict.advice)]),
        Section("How it was found", _method(audit)),
        Section("What was not tried", [Bullets(verdict.not_tried)]),
        Section("The prompts", [_samples(audit)]),
    ]


def compare(runs: Sequence[Opened]) -> list[Part]:
    """Audits side by side: the share of tokens read, by what was seen, at the layer that gives most."""
    exposures = list(dict.fromkeys(name for run in runs for name in run.result.exposures))
    rows: list[Sequence[str | Cell]] = []
    for exposure in exposures:
        cells = []
        for run in runs:
            tried = [one for one in run.result.cells if one.exposure == exposure and one.tried]
            cells.append(_cell(max(tried, key=lambda one: one.tokens)) if tried else Cell("–"))
        rows.append([exposure, *cells])
    columns: list[str | Column] = [
        "seen",
        *(Column(f"{run.name}: {run.about}", numeric=True) for run in runs),
    ]
    return [Table(columns, rows, "Share of tokens read, at the layer that gives most of them")]


def files_summary(opened: Opened) -> Summary:
    """The verdict on an audit of files."""
    verdict = judge_files(opened.result)
    return _summary(verdict._replace(findings=verdict.findings[: len(opened.result.kinds)]))


def files_sections(opened: Opened) -> list[Section]:
    """What the files are, the prompts in them, what to do, what was not read."""
    audit: FilesAudit = opened.result
    verdict = judge_files(audit)
    kinds = Table(
        columns=["what it is", Column("files", numeric=True), Column("prompts or pages", numeric=True),
                 Column("in the clear", numeric=True), "how it was recognised"],
        rows=[
            [kind.kind, str(kind.files), str(kind.pieces),
             Cell(str(kind.clear), "bad" if kind.clear else "plain"), kind.about]
            for kind in audit.kinds
        ],
        caption="Files by what wrote them",
    )  # fmt: skip
    notes = [f"{kind.kind}: {note}" for kind in audit.kinds for note in kind.notes]
    prompts: list[Part] = [
        Details(
            f"{one.name}: {one.status}, {one.how}",
            [
                Preformatted(one.text if one.text is not None else " ".join(map(str, one.token_ids))),
                Facts([("kind", one.kind), ("proof", one.proof), ("tokens", str(len(one.token_ids))),
                       ("seconds", f"{one.seconds:.2f}")]),
            ],
        )
        for one in audit.prompts[:_TEXTS]
    ]  # fmt: skip
    if audit.total > _TEXTS:
        prompts.append(Paragraph(f"{audit.total - _TEXTS} more are in prompts.parquet."))
    return [
        Section("What the files are", [kinds, *([Bullets(notes)] if notes else [])]),
        Section("The prompts in them", prompts or [Paragraph("None was read.")]),
        Section("What to do", [Bullets(verdict.advice)]),
        Section("What was not read, or not tried", [Bullets(verdict.not_tried or ("Nothing.",))]),
    ]


def _summary(verdict: Verdict) -> Summary:
    tone: Tone = "bad" if verdict.tone == "bad" else "warn" if verdict.tone == "warn" else "good"
    return Summary(verdict.headline, verdict.findings, tone)


def _table(audit: LeakAudit, about: str) -> list[Part]:
    rows: list[Sequence[str | Cell]] = []
    for exposure in audit.exposures:
        cells = [audit.at(exposure, layer) for layer in audit.layers]
        rows.append([exposure, *(_cell(cell) for cell in cells)])
    meanings = dict.fromkeys((cell.exposure, cell.about) for cell in audit.cells)
    costs = Table(
        columns=[_COSTS[0], *(Column(name, numeric=True) for name in _COSTS[1:])],
        rows=[_cost(cell) for cell in audit.cells],
        caption="Every cell: shares of prompts read whole and of those verified against the states, what a "
        "reading that is at least 99 % sure is right in, and what it cost",
    )
    return [
        Table(
            columns=["seen", *(Column(f"layer {layer}", numeric=True) for layer in audit.layers)],
            rows=rows,
            caption="Share of tokens read; below it the share of prompts read whole. Guessing the next token "
            f"from the true words before it, without any state, gives {audit.baseline:.1%}.",
        ),
        Details("What the names of the rows mean", [Facts([*meanings])]),
        Figure(named(leak_map(audit), about), _map_in_words(audit), "The same as a map."),
        Details("Confidence, verification and cost of every cell", [costs]),
    ]


def _cell(cell: LeakCell | None) -> Cell:
    if cell is None:
        return Cell("–", note="the layer has none")
    if not cell.tried:
        return Cell("not tried")
    short = any(one.hurried for one in cell.sample)  # which is no evidence of safety
    tone: Tone = "bad" if cell.tokens >= READ else "warn" if cell.tokens > SAFE or short else "good"
    tried = f", {cell.tried} tried" if cell.untried else ""
    if cell.hurried and len(cell.sample) < cell.tried:
        tried = f" of {len(cell.sample)}; {cell.hurried} in haste: {cell.in_haste:.0%}"
    elif cell.hurried:
        tried = f", {cell.hurried} in haste"
    return Cell(f"{cell.tokens:.1%}", tone, f"{cell.exact:.0%} whole{tried}")


def _cost(cell: LeakCell) -> list[str]:
    return [
        cell.exposure, str(cell.layer), f"{cell.exact:.0%}", f"{cell.verified:.0%}", f"{cell.tokens:.1%}",
        f"{cell.sure_right:.1%}", f"{cell.passes:.1f}", f"{cell.seconds_a_prompt:.2f}",
    ]  # fmt: skip


def _map_in_words(audit: LeakAudit) -> str:
    return "Share of tokens read, layers from left to right. " + " ".join(
        f"{exposure}: "
        + ", ".join(f"{cell.tokens:.0%}" for layer in audit.layers if (cell := audit.at(exposure, layer)))
        + "."
        for exposure in audit.exposures
    )


def _curve(audit: LeakAudit, family: str, about: str) -> Figure:
    words = []
    for layer in audit.layers:
        points = [
            f"{cell.exposure.partition(':')[2]}: {cell.tokens:.0%}" for cell in audit.curve(family, layer)
        ]
        if points:
            words.append(f"Layer {layer}, tokens read by strength: {', '.join(points)}.")
    caption = "Solid: tokens read. Dashed: positions at which the model, going on with these states, has "
    caption += "another likeliest next token."
    if family == "noise" and audit.margins:
        caption += (
            " Dotted: positions at which the noise is shorter than D/2, so that no noise of that length can "
            "hide the token."
        )
    return Figure(named(defence_figure(audit, family), about), " ".join(words), caption)


def _method(audit: LeakAudit) -> list[Part]:
    options = audit.options
    return [
        Paragraph(
            "Each prompt was run through the model, its states at a layer were exposed in one of the ways of "
            "the table, and read back by preimage's inverter, which had the model, the layer and the kind of "
            "exposure, and neither the prompt nor any secret (noise, order, rotation). A reading counts "
            "where its token ids are the prompt's, token by token; it is verified where a pass over the "
            "recovered prompt gives the very states."
        ),
        Paragraph(
            f"Time: {options['minutes']:g} minutes for all cells. Where that was too little to read every "
            "prompt of a cell to the end, shares are of the first ones, which were; others (in haste) were "
            "read as far as a short look goes, and what that gave stands beside it: more time would read "
            "more. One vector was searched for "
            f"{options['search_seconds']:g} s a prompt, {options['searched']} prompts a cell. Seed of noise "
            f"and secrets: {options['seed']}."
        ),
    ]


def _samples(audit: LeakAudit) -> Details:
    return Details(
        f"The first {len(audit.samples)} of {audit.prompts}", [Preformatted(one) for one in audit.samples]
    )


def _lengths(lengths: tuple[int, int]) -> str:
    low, high = lengths
    return str(low) if low == high else f"{low} to {high}"
