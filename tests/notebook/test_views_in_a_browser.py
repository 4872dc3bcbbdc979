"""Views as a browser draws them, on the light and dark grounds of notebooks, and full of hostile texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.axe import serious_violations
from support.browser import Browser, Tab, needs_browser
from support.hostile import HOSTILE
from support.shown_results import results, saying

pytestmark = needs_browser

# What JupyterLab and VS Code draw on; nothing else of them is taken over.
GROUNDS = {"light": ("#ffffff", "#212121"), "dark": ("#111111", "#e0e0e0")}
PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Notebook</title>'
    '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"></head>'
    '<body style="background:{};color:{};font:14px sans-serif"><main><h1>Views</h1>{}</main></body></html>'
)
_ODD = """
(() => {
  const all = [...document.querySelectorAll("main *")];
  const names = new Set(all.map((one) => one.localName));
  const foreign = all.flatMap((one) => [...one.attributes].map((a) => a.name));
  return [[...names].sort(), [...new Set(foreign)].sort(), document.scripts.length];
})()
"""
_POKE = """
for (const one of document.querySelectorAll("*"))
  for (const kind of ["mouseover", "click", "focus", "mouseout"])
    one.dispatchEvent(new MouseEvent(kind, { bubbles: kind != "focus" }));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def open_(views: list[str], ground: str = "light", width: int = 1280) -> Tab:
        path = tmp_path / f"{ground}.html"
        path.write_text(PAGE.format(*GROUNDS[ground], "".join(views)), encoding="utf-8")
        tabs.append(browser.open(path, width=width))
        return tabs[-1]

    yield open_
    for tab in tabs:
        tab.close()


@pytest.mark.parametrize("ground", GROUNDS)
def test_views_are_read_on_light_and_dark(opened: Callable[..., Tab], ground: str) -> None:
    views = [result._repr_html_() for result in results().values()]
    tab = opened(views, ground)
    tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    for width in (360, 1280):
        tab.show(width, dark=ground == "dark")
        assert tab.run("document.documentElement.scrollWidth") <= width
    assert serious_violations(tab) == []


def test_hostile_texts_run_and_load_nothing(opened: Callable[..., Tab]) -> None:  # W1
    shown: dict[str, Any] = {
        name: result for name, result in results().items() if name not in ("States", "LanguageModel")
    }
    tab = opened([saying(one, text)._repr_html_() for text in HOSTILE.values() for one in shown.values()])
    tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    tab.run(_POKE)
    tab.run("new Promise((done) => setTimeout(done, 300))")
    assert tab.run("window.pwned") is None
    names, attributes, scripts = tab.run(_ODD)
    ours = {"caption", "details", "div", "h1", "span", "summary", "table", "tbody", "td", "th", "thead"}
    assert set(names) <= ours | {"tr", "wbr"}
    assert set(attributes) == {"class", "open", "scope", "style", "title"}  # opened above
    assert scripts == 0
    assert [url[:8] for url in tab.requests() if not url.startswith("data:")] == ["file:///"]
    assert tab.complaints() == []
