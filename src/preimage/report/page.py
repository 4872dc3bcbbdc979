"""One html file that holds all it shows: no request, no script but ours, every text as text.

    from preimage.report import Cell, Column, Notice, Page, Section, Table, print_pdf, save_page

    verdict = Notice("Every prompt can be read.", "2 of 2 prompts, from layer 15 in bf16.", "bad")
    table = Table(
        columns=["observation", Column("prompts read", numeric=True)],
        rows=[["layer 15", Cell("2 of 2", "bad", note="exactly")], ["noise 100 %", Cell("0 of 2", "good")]],
        caption="Prompts read, by what was stored of them.",
    )
    page = Page("What leaks from smollm2", "100 prompts, float32", [Section("Verdict", [verdict, table])])
    print_pdf(save_page("leak.html", page), "leak.pdf")

Scripts run by their hash alone (Content-Security-Policy), so that even an element that slipped through could
do nothing and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from preimage.markup import SHORT, Markup, flat, joined, tag, visible
from preimage.report.drawing import Drawer, data_script
from preimage.report.parts import Part
from preimage.report.plots import plotly_script, themes
from preimage.storage import Place, place_of, write_text

_MOST_WITHOUT_CONTENTS = 4  # sections


@dataclass(frozen=True)
class Section:
    """A chapter of a page."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A report: what it is about, on what it rests in a line or two, and its chapters."""

    title: str
    subtitle: str
    sections: Sequence[Section]
    footer: str = ""


def save_page(path: str | os.PathLike[str] | Place, page: Page) -> Place:
    """Write the page as one html file, on a disk or at an address; returns where it is."""
    return write_text(place_of(path), render(page))


def render(page: Page) -> str:
    """The page as html. With a figure in it it holds plotly.js, which is 5 MB; without, a few dozen kB."""
    drawer = Drawer()
    sections = [_section(number, section, drawer) for number, section in enumerate(page.sections, 1)]
    scripts = [_resource("page.js")]
    data = Markup("")
    if drawer.has_figures:
        data = data_script("themes", themes())
        scripts.insert(0, plotly_script())
    footer = tag("footer", tag("p", page.footer)) if page.footer else None
    body = joined(_header(page), _contents(page), tag("main", *sections), footer, data)
    written = "\n".join(f"<script>{script}</script>" for script in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
{tag("title", flat(page.title, SHORT))}
<style>
{_resource("page.css")}</style>
</head>
<body>
{body}
{written}
</body>
</html>
"""


def _policy(scripts: Sequence[str]) -> str:
    """Nothing from anywhere, of scripts these; plotly sets styles and draws heat maps as data images."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _header(page: Page) -> Markup:
    title = tag("h1", visible(page.title, SHORT))
    return tag("header", title, tag("p", page.subtitle, class_="subtitle") if page.subtitle else None)


def _contents(page: Page) -> Markup | None:
    if len(page.sections) <= _MOST_WITHOUT_CONTENTS:
        return None
    entries = (
        tag("li", tag("a", visible(section.title, SHORT), href=f"#section-{number}"))
        for number, section in enumerate(page.sections, 1)
    )
    return tag("nav", tag("h2", "Contents", id="contents"), tag("ol", *entries), aria_labelledby="contents")


def _section(number: int, section: Section, drawer: Drawer) -> Markup:
    name = f"section-{number}"
    heading = tag("h2", visible(section.title, SHORT), id=name)
    return tag("section", heading, *map(drawer.part, section.parts), aria_labelledby=name)


@cache
def _resource(name: str) -> str:
    return files("preimage.report").joinpath(name).read_text(encoding="utf-8")
