"""``preimage report``: every kind of run as a page, opened from disk by a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from preimage.cli import main
from preimage.collisions.result import LayerCollisions
from preimage.report import Opened, open_runs, render, run_page, save_page
from preimage.storage import Saved, decode
from support.axe import serious_violations
from support.browser import Browser, Tab, needs_browser
from support.every_run import COMMANDS, PROMPTS, make_runs
from support.hostile import FOREIGN, HOSTILE, POKE

NAMES = (*COMMANDS, "likely", "files")
WITHOUT_FIGURES = ("bundle", "theory", "reproduction", "files")
# What a page shows by its meaning, and not as text: it is one of a few words.
_MEANT = {"status", "unique", "layer", "kind", "exposure", "exposures", "schema", "item", "name_of"}
_FITS = "document.documentElement.scrollWidth <= innerWidth"
_UNDRAWN = """
[...document.querySelectorAll(".plot")].filter((plot) => {
  const box = plot.querySelector("svg.main-svg")?.getBoundingClientRect();
  const drawn = plot.querySelectorAll("svg .trace path, svg .hm image").length;
  return !box || box.width < 200 || box.height < 200 || !drawn;
}).map((plot) => plot.id)
"""
# Legends and axis titles that reach over the edge of their figure.
_CUT = """
[...document.querySelectorAll(".plot")].flatMap((plot) => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll(".legendtext, .xtitle, .ytitle, .xtick text, .ytick text")]
    .filter((one) => {
      const b = one.getBoundingClientRect();
      const wide = b.left < box.left - 2 || b.right > box.right + 2;
      return b.width && (wide || b.top < box.top - 2 || b.bottom > box.bottom + 2);
    }).map((one) => plot.id + ": " + one.textContent);
})
"""
# Figures of which an axis has no title.
_UNNAMED = """
[...document.querySelectorAll(".plot")].filter((plot) => {
  const texts = [...plot.querySelectorAll(".infolayer > g > text")];
  const titles = texts.map((one) => one.getAttribute("class") || "");
  return !titles.some((one) => /^x\\d*title/.test(one)) || !titles.some((one) => /^y\\d*title/.test(one));
}).map((plot) => plot.id)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Callable[..., Tab]:
    def show(opened: list[Opened], **screen: Any) -> Tab:
        path = Path(save_page(tmp_path / "report.html", run_page(opened)))
        tab = browser.open(path, **screen)
        tab.run("new Promise((done) => setTimeout(done, 400))")
        return tab

    return show


def settled(tab: Tab) -> None:
    """Nothing ran, nothing was asked for, nothing was complained about."""
    assert [url[:8] for url in tab.requests() if not url.startswith("data:")] == ["file:///"]
    assert tab.complaints() == []
    assert tab.run("violations") == []
    assert tab.run("window.pwned") is None


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_a_page(
    name: str, width: int, dark: bool, runs: dict[str, Path], shown: Callable[..., Tab]
) -> None:
    tab = shown(open_runs([runs[name]]), width=width, dark=dark)  # W2
    settled(tab)
    assert tab.run(_FITS)
    assert (tab.run("document.querySelectorAll('.plot').length") > 0) == (name not in WITHOUT_FIGURES)
    assert tab.run(_UNDRAWN) == []
    assert tab.run(_CUT) == []
    assert tab.run(_UNNAMED) == []
    title = tab.run("document.querySelector('h1').textContent")
    titles = tab.run("[...document.querySelectorAll('figure > .title')].map((one) => one.textContent)")
    if name not in ("theory", "files"):  # which keep no identity, or no commit
        assert all("commit" in one and ("float" in one) for one in [title, *titles]), [title, *titles]
    assert serious_violations(tab) == []
    tab.close()


@needs_browser
def test_several_runs_are_compared(runs: dict[str, Path], shown: Callable[..., Tab]) -> None:
    given = ["collisions", "lengths", "invert", "likely", "trajectory", "leak", "theory"]
    opened = open_runs([runs[name] for name in given])
    assert [one.name for one in opened][:4] == [
        "collisions",
        "lengths/length-4",
        "lengths/length-6",
        "invert",
    ]
    tab = shown(opened, width=1280)
    settled(tab)
    heads = tab.run("[...document.querySelectorAll('h2')].map((one) => one.textContent)")
    assert "Compared: Do prompts collide?" in heads
    assert "Compared: Prompts from hidden states" in heads
    assert tab.run(_UNDRAWN) == []
    assert tab.run("[...new Set([...document.querySelectorAll('h2')].map((one) => one.id))].length") == len(
        heads
    )
    tab.show(360, dark=True)
    assert tab.run(_FITS)
    assert serious_violations(tab) == []
    tab.close()


# --- what stands on them --------------------------------------------------------------------------


def test_an_inversion_is_text_with_what_is_known_of_every_token(runs: dict[str, Path]) -> None:
    html = render(run_page(open_runs([runs["invert"]])))
    assert "3 of 3 prompts recovered exactly." in html
    assert "nearest other tried" in html
    assert "漢" in html  # three bytes, which are tokens each, are one letter
    proved = render(run_page(open_runs([runs["proved"]])))
    assert "margin D" in proved
    assert "tolerated" in proved


def test_provenance_is_whole(runs: dict[str, Path]) -> None:
    (opened,) = open_runs([runs["collisions"]])
    html = render(run_page([opened])).replace("<wbr>", "")
    record = json.loads((runs["collisions"] / "record.jsonl").read_text())
    for said in (opened.models[0]["weight_hash"], record["commit"], record["date"], record["machine"],
                 record["versions"]["torch"], "The command"):  # fmt: skip
        assert said in html


def test_zeros_are_said(runs: dict[str, Path]) -> None:
    html = render(run_page(open_runs([runs["geometry"]])))
    assert "Exactly 0, which a logarithmic axis cannot show: margin, quantile at layer 0" in html


def test_texts_without_a_tokenizer_are_ids_or_words(runs: dict[str, Path]) -> None:
    (opened,) = open_runs([runs["collisions"]])
    layers = tuple(_without_texts(one) for one in opened.result.layers)
    gone = opened.result.model | {"name": "no/such/model"}
    audit = replace(opened.result, model=gone, layers=layers)
    html = render(run_page([replace(opened, result=audit)]))
    first = opened.result.layers[-1].spacing.closest[0].first_ids
    assert all(f"{token} " in html for token in first)
    assert html.count("<mark>") > 10


def _without_texts(layer: LayerCollisions) -> LayerCollisions:
    closest = tuple(replace(pair, first_text=None, second_text=None) for pair in layer.spacing.closest)
    return replace(layer, spacing=replace(layer.spacing, closest=closest))


# --- hostile texts --------------------------------------------------------------------------------


def poisoned(value: Any, turn: Callable[[], str], key: str = "") -> Any:
    """The same with every text, and every name in its records, from somebody who attacks."""
    if isinstance(value, str):
        return value if key in _MEANT else turn()
    if isinstance(value, dict):
        return {name: poisoned(part, turn, name) for name, part in value.items()}
    return [poisoned(part, turn, key) for part in value] if isinstance(value, list | tuple) else value


def attacked(opened: Opened) -> Opened:
    texts = [text for name, text in HOSTILE.items() if not name.startswith("long")]
    count = iter(range(1_000_000))

    def turn() -> str:
        return texts[next(count) % len(texts)]

    def attack(result: Any) -> Any:
        if isinstance(result, list):
            return [attack(one) for one in result]
        if isinstance(result, dict):
            return poisoned(result, turn)
        assert isinstance(result, Saved)
        return type(result).from_dict(poisoned(result.to_dict(), turn))

    return Opened(
        turn(), opened.kind, attack(opened.result), tuple(poisoned(opened.models, turn)),
        tuple(poisoned(opened.records, turn)), poisoned(opened.options, turn), turn(),
    )  # fmt: skip


@needs_browser
@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_are_text_in_every_field(  # W1
    name: str, runs: dict[str, Path], shown: Callable[..., Tab]
) -> None:
    tab = shown([attacked(one) for one in open_runs([runs[name]])], width=1280)
    tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    settled(tab)
    assert tab.run(_UNDRAWN) == []
    tab.show(360, dark=False)
    assert tab.run(_FITS)
    figures = tab.run("document.querySelectorAll('.plot').length")
    tab.run(POKE)
    assert tab.run("window.pwned") is None
    assert tab.run(FOREIGN) == [0, 0, 2 if figures else 1, "HEAD"]
    tab.close()


@needs_browser
@pytest.mark.parametrize("name", ["long", "long markup"])
def test_a_megabyte_is_cut(name: str, runs: dict[str, Path], shown: Callable[..., Tab]) -> None:
    (opened,) = open_runs([runs["invert"]])
    text = HOSTILE[name]
    reading = opened.result[0].reading._replace(text=text)
    models = tuple(model | {"name": text} for model in opened.models)
    one = replace(opened.result[0], text=text, reading=reading, reason=text)
    tab = shown([Opened(text, opened.kind, [one], models, opened.records, {text[:999]: text})], width=360)
    settled(tab)
    assert tab.run(_FITS)
    assert tab.run("document.documentElement.outerHTML.length") < 8_000_000
    tab.close()


def test_prompts_that_attack_are_inverted_and_shown_as_text(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    given = [
        part for name in ("nul", "bidi", "terminal", "separators") for part in ("--text", HOSTILE[name][:30])
    ]
    model = str(runs["collisions"].parent / "model")
    assert (
        main(["invert", "--model", model, *given, "--layer", "1", "--out", str(tmp_path / "r"), "--json"])
        == 0
    )
    assert main(["report", str(tmp_path / "r"), "--json"]) == 0
    html = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert "␀" in html
    assert not set("\u202e\x1b\x9b\u2028\0") & set(html)


def test_what_is_poisoned_is_read_as_before() -> None:
    assert decode(tuple[str, ...], poisoned(("a", "b"), lambda: "x")) == ("x", "x")
    assert poisoned({"status": "recovered", "text": PROMPTS[0]}, lambda: "x") == {
        "status": "recovered",
        "text": "x",
    }
