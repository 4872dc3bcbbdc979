"""The pages of ``preimage leak``: whole, small enough, hostile prompts as text, drawn by a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from preimage.leak.exposures import Exposure
from preimage.leak.result import FileKind, FilePrompt, FilesAudit, LeakAudit, LeakCell, PromptRead, Utility
from preimage.report import render, save_page
from preimage.report.leak import files_page, leak_page
from support.browser import Browser, needs_browser

LAYERS = (1, 8, 15, 22, 30, "final")
EXPOSURES = (
    "float32", "bf16", "int8", "int4", "keys", "values", "noise:5", "noise:20", "noise:100", "permuted",
    "last",
)  # fmt: skip
HOSTILE = "<script>window.pwned=1</script><img src=x onerror='window.pwned=1'>{{7*7}}\u202e\x1b[31m\x00"
MODEL = {"name": HOSTILE, "architecture": "Llama", "dtype": "float32", "weight_hash": "ab" * 32}
RECORD = {"date": "2026-01-01", "versions": {"torch": "2"}, "machine": "x86_64", "command": None}


def cell(exposure: str, layer: int | str, prompts: int) -> LeakCell:
    """All read at low noise, little at high, one vector not tried on most."""
    good = not exposure.startswith(("noise:100", "last"))
    tried = 10 if exposure == "last" else prompts
    read = PromptRead(
        "recovered" if good else "not_recovered", 16, 16 if good else 3, good, 16, 16, 0.99, 0.1, 40
    )
    return LeakCell(
        exposure=exposure, about=Exposure.parse(exposure).about, layer=layer, prompts=(read,) * tried,
        untried=prompts - tried, why="10 prompts were searched for" if tried < prompts else "",
        setup_seconds=1.0, seconds=20.0,
        utility=Utility(0.3, 0.4, 20.0, 12.0) if exposure.startswith("noise") else None,
    )  # fmt: skip


def audit(prompts: int = 100, samples: int = 20) -> LeakAudit:
    cells = [
        cell(exposure, layer, prompts)
        for layer in LAYERS
        for exposure in EXPOSURES
        if not (layer == "final" and exposure in ("keys", "values"))
    ]
    return LeakAudit(
        model=MODEL, prompts=prompts, lengths=(16, 16), source=HOSTILE, fingerprint="0", options={
            "exposures": list(EXPOSURES), "minutes": 25.0, "search_seconds": 3.0, "searched": 10,
            "seed": 0,
        },
        cells=tuple(cells), baseline=0.3, margins={1: (0.3, 0.5), 15: (0.1, 0.4)},
        samples=(HOSTILE,) * samples,
    )  # fmt: skip


def files(prompts: int = 3) -> FilesAudit:
    one = FilePrompt(HOSTILE, HOSTILE, HOSTILE, "recovered", (1, 2), HOSTILE, 1.0, HOSTILE, 0.1)
    kind = FileKind(HOSTILE, 2, 3, 1, HOSTILE, (HOSTILE,), (HOSTILE,))
    return FilesAudit(MODEL, (HOSTILE,), (kind,), (one,) * prompts, prompts, ((HOSTILE, HOSTILE),), 2, 1.0)


PAGES = {
    "audit": lambda: leak_page(audit(), RECORD, f"preimage leak {HOSTILE}"),
    "files": lambda: files_page(files(), RECORD, f"preimage leak {HOSTILE}"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_small_and_has_all_its_chapters(name: str) -> None:
    page = PAGES[name]()
    html = render(page)
    assert len(html.encode()) < 8_000_000
    assert "<script>window" not in html
    assert "\u202e" not in html
    assert "\x00" not in html
    titles = [section.title for section in page.sections]
    assert titles[0] == "Verdict"
    assert "What to do" in titles
    assert titles[-1] == "Where this comes from"
    for said in ("sha256", "x86_64", "preimage leak"):
        assert said in html


def test_what_was_not_tried_is_said() -> None:
    html = render(leak_page(audit(), RECORD))
    assert "last at layer 15: 90 of 100 prompts (10 prompts were searched for)" in html
    assert "10 tried" in html
    assert "the layer has none" in html


def test_what_was_read_in_haste_is_said_and_is_no_evidence_of_safety() -> None:
    slow = PromptRead("not_recovered", 100, 1, False, 0, 0, 0.5, 0.1, 30, hurried=True, glanced=True)
    whole = replace(slow, status="recovered", right=100, exact=True, hurried=False, glanced=False)
    some = (
        replace(cell("noise:5", 1, 4), prompts=(whole, slow, slow, slow)),
        replace(cell("noise:20", 1, 4), prompts=(slow,) * 4),
    )
    html = render(leak_page(replace(audit(4), cells=some, margins={}), RECORD))
    assert "100% whole of 1; 3 in haste: 1%" in html
    assert "0% whole, 4 in haste" in html
    assert 'aria-label="good"' not in html
    assert "noise:20 at layer 1: 4 of 4 prompts were not read to the end" in html


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_browser_shows_it_and_runs_nothing_of_theirs(
    name: str, width: int, dark: bool, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "leak.html"
    save_page(path, PAGES[name]())
    tab = browser.open(path, width, dark)
    try:
        assert tab.run("window.pwned === undefined")
        assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
        drawn = tab.run("document.querySelectorAll('.main-svg').length")
        assert (drawn > 0) == (name == "audit")
        assert [url for url in tab.requests() if not url.startswith("data:")] == [path.as_uri()]
        assert tab.complaints() == []
        assert (
            tab.run("document.querySelectorAll('main img, main iframe, main a[href^=javascript]').length")
            == 0
        )
    finally:
        tab.close()
