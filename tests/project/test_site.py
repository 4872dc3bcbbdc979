"""The site: it builds without a warning, holds every command and public name, and keeps nobody out."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import typer
from filelock import FileLock

import preimage
from preimage.cli.app import app
from support.axe import serious_violations
from support.browser import Browser, needs_browser
from support.documents import ROOT

DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None,
    reason="NO SPHINX: the site is not built; run `make docs` once",
)
# One of every kind: words, drawings, wide tables, generated options, docstrings, measured figures.
LOOKED_AT = (
    "index",
    "guide/concepts",
    "guide/logged",
    "commands/index",
    "commands/invert",
    "results/geometry",
)


@pytest.fixture(scope="session")
def site() -> Path:
    """The site, built as `make docs` builds it, once for all workers of a run."""
    home = Path(os.environ["PREIMAGE_TEST_HOME"]) / "site"
    with FileLock(f"{home}.lock"):
        if not home.is_dir():
            flags = ("--builder", "html", "--nitpicky", "--fail-on-warning", "--keep-going", "--quiet")
            command = [sys.executable, "-m", "sphinx", *flags, DOCS, home.with_suffix(".new")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout + done.stderr) == (0, "")
            home.with_suffix(".new").rename(home)
    return home


@pytest.fixture
def directives(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The extension that writes pages of commands."""
    monkeypatch.syspath_prepend(str(DOCS / "extension"))
    return importlib.import_module("command_pages")


def words(page: Path) -> str:
    """The text of a page as it is read."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_every_command_and_option_has_its_place(site: Path) -> None:
    for name, command in typer.main.get_command(app).commands.items():
        own = site / "commands" / f"{name}.html"
        text = words(own if own.is_file() else site / "commands" / "others.html")
        assert f"preimage {name}" in words(site / "commands" / "index.html")
        parts = getattr(command, "commands", {"": command})
        for part, one in parts.items():
            if one.hidden:
                continue
            assert f"preimage {name} {part}".strip() in text
            missing = [
                option
                for given in one.params
                for option in given.opts
                if option[0] == "-" and option not in text
            ]
            assert not missing, f"preimage {name} {part}: {missing}"


def test_a_new_command_is_described_without_anybody_writing(directives: Any) -> None:
    new = typer.Typer()

    @new.command()
    def listen(
        port: int = typer.Option(8000, help="Where it listens; see --host."), host: str = "here"
    ) -> None:
        """Wait for somebody."""

    text = "\n".join(
        node.astext() for node in directives.whole(typer.main.get_command(new), "preimage listen")
    )
    for said in ("Wait for somebody.", "preimage listen [OPTIONS]", "--port", "Where it listens", "8000"):
        assert said in text
    assert directives.pages() >= {"invert", "lens"}
    assert "listen" not in directives.pages()


def test_pages_are_about_commands_that_are_there(directives: Any) -> None:
    assert directives.pages() - {"index", "others"} <= directives.commands().keys()


def test_every_public_name_has_its_place(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in preimage.__all__:
        assert re.search(rf'id="preimage\.(\w+\.)?{name}"', text), name
    assert "Recover every prompt from its states at one layer." in words(site / "api.html")


def test_drawings_say_in_words_what_they_show(site: Path) -> None:
    drawn = {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    text = (site / "guide" / "concepts.html").read_text(encoding="utf-8")
    assert drawn == set(re.findall(r'role="img" aria-labelledby="([a-z]+)-title \1-desc"', text))
    for name in drawn:
        assert re.search(
            rf'<title id="{name}-title">.+?</title>\s*<desc id="{name}-desc">.{{80,}}?</desc>', text
        )


def test_a_page_asks_nobody_else_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        asked = re.findall(
            r'<(?:script|img|iframe|source)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', text
        )
        outside = [one for pair in asked for one in pair if re.match(r"\w+:|//", one) and one[:5] != "data:"]
        assert not outside, page


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_are_for_everybody(site: Path, width: int, dark: bool) -> None:
    with Browser() as browser:
        for name in LOOKED_AT:
            tab = browser.open(site / f"{name}.html", width, dark)
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} is too wide"
            assert [one for one in tab.requests() if not one.startswith(("file:", "data:"))] == []
            assert serious_violations(tab) == [], name
            tab.close()


@needs_browser
def test_the_reference_is_for_everybody(site: Path) -> None:
    with Browser() as browser:  # it is long, and looking at it takes a while: once
        tab = browser.open(site / "api.html", 360)
        assert serious_violations(tab) == []
