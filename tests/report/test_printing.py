"""A page as a pdf; and what is said where there can be none."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preimage.errors import MissingExtraError, OptionError
from preimage.report import Page, Section, print_pdf, printing, save_page
from support.browser import needs_browser
from support.refusing import refused


@needs_browser
def test_a_page_is_printed_with_all_it_holds(tmp_path: Path, sample: Page) -> None:
    html = save_page(tmp_path / "a # b%20c?.html", sample)
    pdf = print_pdf(html, tmp_path / "new" / "page.pdf")
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 8
    assert not list(pdf.parent.glob("*.partial"))
    if not shutil.which("pdftotext"):
        return  # its words are compressed, and nothing else here reads them
    told = subprocess.run(["pdftotext", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    for words in ("What leaks from smollm2", "Folded words.", "share of tokens read", "70 %, truth"):
        assert words in told


@needs_browser
def test_paper_is_a4_upright(tmp_path: Path) -> None:
    pdf = print_pdf(save_page(tmp_path / "a.html", Page("t", "s", [Section("c", [])])), tmp_path / "a.pdf")
    (box,) = set(re.findall(rb"/MediaBox\s*\[([^]]*)\]", pdf.read_bytes()))
    width, height = [round(float(number)) for number in box.split()[2:]]
    assert abs(width - 595) <= 1
    assert abs(height - 842) <= 1


def test_a_page_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "_browser", lambda: "chromium")
    error = refused(OptionError, lambda: print_pdf(tmp_path / "none.html", tmp_path / "a.pdf"))
    assert "none.html" in str(error)


def test_without_a_browser_or_the_extra_printing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from choreographer.browsers.chromium import Chromium

    monkeypatch.setattr(Chromium, "find_browser", classmethod(lambda *_, **__: None))
    error = refused(MissingExtraError, lambda: print_pdf(tmp_path / "a.html", tmp_path / "a.pdf"))
    assert "Chromium" in error.hint
    monkeypatch.setitem(sys.modules, "choreographer.browsers.chromium", None)
    error = refused(MissingExtraError, lambda: print_pdf(tmp_path / "a.html", tmp_path / "a.pdf"))
    assert "preimage[print]" in error.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("exit 3", "code 3"),
        ("exit 0", "no pdf"),
        ("exec sleep 60", "longer than 1 s"),
        ('for one; do case $one in --print-to-pdf=*) echo broken > "${one#*=}";; esac; done', "no pdf"),
    ],
)
def test_a_browser_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    browser.chmod(0o755)
    monkeypatch.setattr(printing, "_browser", lambda: str(browser))
    html, pdf = save_page(tmp_path / "a.html", Page("t", "s", [])), tmp_path / "a.pdf"
    pdf.write_bytes(b"the last one")
    error = refused(OptionError, lambda: print_pdf(html, pdf, seconds=1))
    assert said in str(error)
    assert pdf.read_bytes() == b"the last one"


def test_a_browser_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "_browser", lambda: "/gone/chromium")
    html = save_page(tmp_path / "a.html", Page("t", "s", []))
    assert "/gone/chromium" in str(refused(OptionError, lambda: print_pdf(html, tmp_path / "a.pdf")))
