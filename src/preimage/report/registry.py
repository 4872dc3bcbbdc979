"""Which module shows which kind of result, and the page that is made of any of them.

A kind is added by its module, with a summary and sections, and its entry in ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from preimage.report import (
    bundle,
    collisions,
    continuations,
    geometry,
    inversion,
    leak,
    lens,
    reproduction,
    theory,
    trajectory,
)
from preimage.report.opened import Opened, Summary, made_together, provenance
from preimage.report.page import Page, Section
from preimage.report.parts import Bullets, Cell, Notice, Part, Table

_CHAPTERS = 12  # runs of which a page tells everything; of more, summaries


@dataclass(frozen=True)
class Kind:
    """How one kind of result is shown; ``compare``: several of them side by side."""

    title: str
    summary: Callable[[Opened], Summary]
    sections: Callable[[Opened], list[Section]]
    compare: Callable[[Sequence[Opened]], list[Part]] | None = None


KINDS: dict[str, Kind] = {
    "inversion": Kind("Prompts from hidden states", inversion.summary, inversion.sections, inversion.compare),
    "collisions": Kind("Do prompts collide?", collisions.summary, collisions.sections, collisions.compare),
    "continuations": Kind(
        "Do next tokens collide?", continuations.summary, continuations.sections, continuations.compare
    ),
    "geometry": Kind("How far from a collision", geometry.summary, geometry.sections, geometry.compare),
    "geometry-sweep": Kind("How far from a collision", geometry.sweep_summary, geometry.sweep_sections),
    "trajectory": Kind(
        "Geometry along a training", trajectory.summary, trajectory.sections, trajectory.compare
    ),
    "theory": Kind("What the theory states, checked", theory.summary, theory.sections, theory.compare),
    "leak audit": Kind("What leaks", leak.summary, leak.sections, leak.compare),
    "files audit": Kind("What files give away", leak.files_summary, leak.files_sections),
    "reproduction": Kind(
        "Published and measured", reproduction.summary, reproduction.sections, reproduction.compare
    ),
    "states": Kind("A bundle of states", bundle.summary, bundle.sections),
    "lens": Kind("A lens", lens.summary, lens.sections, lens.compare),
}


def run_page(opened: Sequence[Opened], footer: str = "") -> Page:
    """The page of what :func:`preimage.report.open_runs` opened; several are compared first."""
    if len(opened) == 1:
        (one,) = opened
        sections = [Section("In short", _in_short(one)), *KINDS[one.kind].sections(one)]
        sections.append(Section("Where this comes from", provenance(one)))
        return Page(f"{KINDS[one.kind].title} · {one.about}", _subtitle(one), sections, footer)
    title = f"{len(opened)} runs side by side · {made_together(opened)}"
    sections = [Section("In short", [_overview(opened)]), *_compared(opened)]
    for one in opened[:_CHAPTERS]:
        sections.append(Section(f"{one.name}: {KINDS[one.kind].title}", _in_short(one)))
        sections += [
            Section(f"{one.name}: {section.title}", section.parts)
            for section in KINDS[one.kind].sections(one)
        ]
        sections.append(Section(f"{one.name}: where this comes from", provenance(one)))
    if len(opened) > _CHAPTERS:
        left = [one.name for one in opened[_CHAPTERS:]]
        sections.append(Section("Not told here", [Bullets(left)]))
    return Page(title, ", ".join(one.name for one in opened), sections, footer)


def _in_short(one: Opened) -> list[Part]:
    said = KINDS[one.kind].summary(one)
    warned: list[Part] = []
    if one.unfinished:
        warned = [
            Notice(
                one.unfinished, "Rerun the same command: it continues. This page is of what is done.", "warn"
            )
        ]
    return [*warned, *said.parts]


def _subtitle(one: Opened) -> str:
    """Which run, of what, when."""
    more = leak.subtitle(one) if one.kind in ("leak audit", "files audit") else ""
    return ", ".join(filter(None, (one.name, more, one.date)))


def _overview(opened: Sequence[Opened]) -> Table:
    rows: list[list[str | Cell]] = []
    for one in opened:
        said = KINDS[one.kind].summary(one)
        note = one.unfinished
        rows.append([one.name, one.about, one.date, Cell(said.headline, said.tone, note)])
    return Table(["run", "by", "date", "in short"], rows, "Everything on this page")


def _compared(opened: Sequence[Opened]) -> list[Section]:
    """What several runs of one kind have to say together."""
    kinds: dict[str, list[Opened]] = {}
    for one in opened:
        kinds.setdefault(one.kind, []).append(one)
    found = []
    for kind, some in kinds.items():
        compare = KINDS[kind].compare
        if compare is not None and len(some) > 1:
            found.append(Section(f"Compared: {KINDS[kind].title}", compare(some)))
    return found
