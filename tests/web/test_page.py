"""The page as people see it: a tiny model behind it, a real browser before it."""

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import preimage
from support.axe import serious_violations
from support.browser import Browser, needs_browser
from support.hostile import HOSTILE
from support.pages import ServedPage
from support.serving import Server

pytestmark = needs_browser
PROMPT = "the cat sat on a mat"


@pytest.fixture
def page(browser: Browser, server: Server) -> ServedPage:
    one = ServedPage(browser, server.url)
    one.ready()
    return one


@pytest.fixture(scope="module")
def states(model_folder: Path) -> preimage.States:
    return preimage.capture(preimage.load(str(model_folder)), [PROMPT, "a dog"], [1, 2])


def test_a_typed_prompt_is_inverted_and_sipit_beside_it(page: ServedPage) -> None:
    page.put("prompt", PROMPT)
    page.put("layer", "2")
    page.put("sipit-seconds", 5)
    page.click("go-prompt")
    page.until("document.querySelector('#out-prompt .notice')")
    page.done()
    shown = page.text("out-prompt")
    assert "Recovered: this prompt, and no other." in shown
    assert "It is the prompt that was run." in shown
    assert page.tab.run("document.querySelector('#out-prompt pre').textContent") == f"<s>{PROMPT}"
    assert page.tab.run("document.querySelectorAll('#out-prompt .tokens .settled').length") > 5
    rows = page.tab.run("""[...document.querySelectorAll('#out-prompt table')][0].innerText""")
    passes = dict(re.findall(r"(preimage|SIPIT)[^\t]*\t\d+ of \d+\t(\d+)", rows))
    assert 0 < int(passes["preimage"]) < int(passes["SIPIT"]), rows
    assert int(page.tab.run("document.getElementById('out-prompt').dataset.first")) < 60_000
    page.quiet()


def test_noise_is_drawn_beside_the_bound_and_read_or_not(page: ServedPage) -> None:
    page.put("prompt", PROMPT)
    page.put("layer", "1")
    page.click("tab-noise")
    for percent, tone in ((0, "good"), (1000, None)):
        page.tab.run("document.getElementById('percent').max = 1000")
        page.put("percent", percent)
        page.click("go-noise")
        page.done()
        assert page.tab.run("document.querySelectorAll('#chart circle.bound').length") > 5
        assert f"noise {percent} %" in page.tab.run("document.querySelector('#chart svg').textContent")
        notice = page.tab.run("document.querySelector('#out-noise .notice').className")
        assert notice != "notice good" if tone is None else notice == "notice good"
    page.click("go-margins")
    page.done()
    count = page.tab.run("document.querySelectorAll('#chart tbody tr').length")
    assert page.tab.run("document.querySelectorAll('#chart circle.measured').length") == count + 1, (
        "and its key"
    )
    page.tab.run("document.querySelector('#chart details').open = true")
    for row in page.tab.run(
        "[...document.querySelectorAll('#chart tbody tr')].map((r) => r.innerText.split('\\t'))"
    ):
        measured, most = (float(cell.removesuffix(" %")) for cell in row[2:4])
        assert measured <= most * 1.01, "what some tokens show is no less than what all do"
    page.quiet()


def test_every_layer_is_tried_and_shown(page: ServedPage) -> None:
    page.put("prompt", PROMPT)
    page.click("tab-layers")
    page.click("go-layers")
    page.done()
    rows = page.tab.run("document.querySelectorAll('#out-layers tbody tr').length")
    assert rows == 5, "0 to 3, and final"
    assert page.tab.run("document.getElementById('out-layers').dataset.whole") == "5 of 5"
    assert page.tab.run("document.querySelectorAll('#out-layers td.good').length") >= 5 * 6
    page.quiet()


# --- files --------------------------------------------------------------------------------------


def drop(page: ServedPage, *files: Path, layer: str = "") -> str:
    page.click("tab-file")
    page.put("file-layer", layer)
    page.choose(files)
    page.click("go-file")
    page.until("document.querySelector('#out-file .notice')")
    page.done()
    return page.text("out-file")


def test_a_bf16_tensor_is_inverted(page: ServedPage, states: preimage.States, tmp_path: Path) -> None:
    save_file({"hidden": states.at(0, 2).bfloat16().contiguous()}, tmp_path / "seen.safetensors")
    shown = drop(page, tmp_path / "seen.safetensors", layer="2")
    assert PROMPT in shown
    assert "Recovered" in shown
    page.quiet()


def test_arrays_are_inverted(page: ServedPage, states: preimage.States, tmp_path: Path) -> None:
    np.save(tmp_path / "seen.npy", states.at(1, 1).numpy())
    assert "a dog" in drop(page, tmp_path / "seen.npy", layer="1")


def test_a_bundle_is_inverted(page: ServedPage, states: preimage.States, tmp_path: Path) -> None:
    states.save(tmp_path / "bundle", withhold_ids=True)
    files = sorted((tmp_path / "bundle").iterdir())
    assert "This bundle holds 2 layers." in drop(page, *files)
    shown = drop(page, *files, layer="2")
    assert "2 prompts at layer 2." in shown
    assert PROMPT in shown
    assert "a dog" in shown
    assert shown.count("Recovered: this prompt, and no other.") == 2
    page.quiet()


def test_states_of_nothing_get_an_honest_no(page: ServedPage, tmp_path: Path) -> None:
    noise = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)) * 40
    save_file({"hidden": noise}, tmp_path / "noise.safetensors")
    shown = drop(page, tmp_path / "noise.safetensors", layer="2")
    assert "No: this is not known to be the state of any prompt." in shown


def test_wrong_files_give_readable_errors(page: ServedPage, states: preimage.States, tmp_path: Path) -> None:
    made = {
        "a.npy": (b"no array at all", "1", "cannot be read as a plain array"),
        "a.safetensors": (b"\xff" * 40, "1", "safetensors"),
        "a.zip": (b"PK", "1", "Unpack it"),
        "a.pt": (b"\x80\x02c", "1", "Save the tensor"),
        "<img src=x onerror=alert(1)>.txt": (b"x", "1", "holds no states"),
    }
    for name, (content, layer, words) in made.items():
        (tmp_path / name).write_bytes(content)
        shown = drop(page, tmp_path / name, layer=layer)
        assert words in shown, name
        assert str(tmp_path) not in shown
        assert "preimage-serve-" not in shown
        assert "Traceback" not in shown
    np.save(tmp_path / "wide.npy", np.zeros((4, 99), dtype=np.float32))
    assert "99" in drop(page, tmp_path / "wide.npy", layer="1")
    np.save(tmp_path / "good.npy", states.at(0, 1).numpy())
    assert "does not say its layer" in drop(page, tmp_path / "good.npy")
    states.save(tmp_path / "bundle")
    tensors = tmp_path / "bundle" / "states.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\0")
    shown = drop(page, *sorted((tmp_path / "bundle").iterdir()), layer="1")
    assert "fails its checksum" in shown or "truncated" in shown
    assert "preimage-serve-" not in shown
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\0" * 5_000_000)
    assert "hundredfold" in drop(page, tmp_path / "bomb.npz", layer="1")


# --- cancelling, hostile texts ------------------------------------------------------------------


def test_a_job_is_cancelled_and_the_next_one_runs(page: ServedPage) -> None:
    page.put("prompt", PROMPT * 3)
    page.put("layer", "final")
    page.put("sipit", "published")
    page.put("sipit-seconds", 120)
    page.click("go-prompt")
    page.until("document.querySelectorAll('#out-prompt .text').length > 1")
    page.click("cancel")
    assert page.done() < 30
    assert "Cancelled." in page.text("out-prompt")
    page.put("prompt", "a dog")
    page.put("sipit", "none")
    page.click("go-prompt")
    page.until("document.querySelector('#out-prompt .notice')")
    page.done()
    assert "Recovered" in page.text("out-prompt")
    page.quiet()


_FOREIGN = """
[...document.querySelectorAll("*")]
  .filter((one) => [...one.attributes].some((a) => /^on/.test(a.name))).length
+ document.querySelectorAll(`iframe, object, embed, img, form, base, audio, video, animate, main b, main i,
    meta[http-equiv=refresh], a[href^="javascript"], style, script:not([src^="/static/"])`).length
"""


@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.startswith("long")])
def test_hostile_prompts_are_text(page: ServedPage, name: str) -> None:  # W1
    page.put("prompt", HOSTILE[name][:120])
    page.put("layer", "1")
    page.put("sipit", "none")
    page.click("go-prompt")
    page.until("document.querySelector('#out-prompt .notice')")
    page.done()
    page.click("tab-layers")
    page.click("go-layers")
    page.until("document.querySelector('#out-layers .notice')")
    page.done()
    assert page.tab.run(_FOREIGN) == 0
    assert page.tab.run("window.pwned") is None
    page.quiet()
    page.tab.close()


def test_a_prompt_of_a_million_letters_is_refused_in_words(page: ServedPage) -> None:  # W6
    page.tab.run("document.getElementById('prompt').value = 'A'.repeat(1000000)")
    page.click("go-prompt")
    page.until("document.querySelector('#out-prompt .notice')")
    assert "The prompt has 1,000,000 letters." in page.text("out-prompt")


def test_another_page_cannot_use_the_server(browser: Browser, server: Server, tmp_path: Path) -> None:  # W4
    (tmp_path / "evil.html").write_text("<p>evil</p>")
    tab = browser.open(tmp_path / "evil.html")
    tried = f"""fetch('{server.url}api/jobs', {{ method: 'POST', body: '{{}}', MODE }})
        .then((a) => a.type + a.status, () => 'refused')"""
    assert tab.run(tried.replace("MODE", "mode: 'cors'")) == "refused"
    json = "headers: { 'Content-Type': 'application/json' }"
    assert tab.run(tried.replace("MODE", json)) == "refused"
    seen = f"fetch('{server.url}api/state').then((a) => a.text(), () => 'refused')"
    assert tab.run(seen) == "refused"
    framed = f"""new Promise((done) => {{ const f = document.createElement('iframe'); f.src = '{server.url}';
        f.onload = () => done(f.contentDocument ? 'read' : 'closed');
        document.body.append(f); }})"""
    assert tab.run(framed) == "closed"


# --- everybody ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_the_screen_and_everybody(page: ServedPage, width: int, dark: bool) -> None:
    page.tab.show(width, dark)
    page.put("prompt", PROMPT + " " + "a" * 60)
    page.put("sipit-seconds", 1)
    for tab, go in (("prompt", "go-prompt"), ("noise", "go-noise"), ("layers", "go-layers")):
        page.click(f"tab-{tab}")
        page.click(go)
        page.until(f"document.querySelector('#out-{tab} .notice')")
        page.done()
        assert page.tab.run("document.documentElement.scrollWidth") <= width, tab
        assert serious_violations(page.tab) == [], tab
    for tab in ("file", "runs"):
        page.click(f"tab-{tab}")
        assert page.tab.run("document.documentElement.scrollWidth") <= width, tab
        assert serious_violations(page.tab) == [], tab


def test_tabs_and_buttons_are_reached_by_the_keyboard(page: ServedPage) -> None:
    page.tab.run("document.getElementById('tab-prompt').focus()")
    for key, name in (("ArrowRight", "file"), ("ArrowRight", "noise"), ("End", "runs"), ("Home", "prompt")):
        page.tab.run(f"""document.activeElement.dispatchEvent(
            new KeyboardEvent('keydown', {{ key: {key!r}, bubbles: true }}))""")
        assert page.tab.run("document.activeElement.id") == f"tab-{name}"
        assert page.tab.run(f"document.getElementById('panel-{name}').hidden") is False
    seen = set()
    for _ in range(8):
        page.tab.press("Tab")
        seen.add(page.tab.run("document.activeElement.id"))
    assert seen >= {"prompt", "layer", "sipit", "sipit-seconds", "go-prompt"}


def test_reports_of_runs_are_opened_in_a_box_of_their_own(
    browser: Browser, server: Server, runs: Path
) -> None:
    evil = "<script>window.ran = 1; fetch('/api/state').then(() => (window.got = 1))</script>"
    (runs / "one").mkdir(exist_ok=True)
    (runs / "one" / "report.html").write_text(f"<title>report</title><p>fine</p>{evil}")
    page = ServedPage(browser, server.url)
    page.click("tab-runs")
    page.until("document.querySelector('#out-runs a')")
    assert (
        page.tab.run("document.querySelector('#out-runs a').getAttribute('href')") == "/runs/one/report.html"
    )
    tab = browser.open(f"{server.url}runs/one/report.html")
    assert tab.run("document.body.innerText") == "fine"
    assert tab.run("[window.ran, window.got ?? null, origin]") == [1, None, "null"]
    assert any(violation.startswith("connect-src") for violation in tab.run("violations"))
