"""The report of a large run is small enough to send, and quick to open; and those of the real model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import preimage
from preimage.cli import main
from preimage.models import LanguageModel
from preimage.report import open_runs, run_page, save_page
from support.browser import Browser, needs_browser
from support.tiny import build

_OPENED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search over 2,000 prompts and 32 layers."""
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    model = preimage.load(build("llama", num_hidden_layers=32, hidden_size=16, intermediate_size=16))
    prompts = preimage.gather("random", model, preimage.PromptOptions(count=2000, length=8))
    preimage.find_collisions(model, prompts, out=tmp_path / "large", hard_bases=1)
    return tmp_path / "large"


@needs_browser
def test_a_large_run_is_small_and_quick(large: Path, browser: Browser) -> None:
    opened = open_runs([large])
    assert (opened[0].result.prompts, len(opened[0].result.layers)) == (2000, 34)
    path = Path(save_page(large / "report.html", run_page(opened)))
    assert path.stat().st_size < 8_000_000
    took = []
    for _ in range(2):  # the first time a browser has never seen plotly
        began = time.perf_counter()
        tab = browser.open(path)
        assert tab.run("document.querySelectorAll('.plot svg.main-svg').length") >= 6
        took.append(min(time.perf_counter() - began, tab.run(_OPENED) / 1000))
        tab.close()
    assert min(took) < 3


@pytest.mark.real_model
@needs_browser
def test_the_real_model_inverted(smollm2: LanguageModel, browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert (
        main(["invert", "--text", "The password is 漢字.", "--layer", "15", "--out", str(out), "--json"]) == 0
    )
    assert main(["report", str(out), "--json"]) == 0
    tab = browser.open(out / "report.html")
    assert "漢" in tab.run("document.querySelector('.tokens').textContent")
    assert "smollm2, float32, commit" in tab.run("document.title")
    assert "nearest other tried" in tab.run("document.querySelector('.tokens .t').title")
    assert tab.complaints() == []
    tab.close()
