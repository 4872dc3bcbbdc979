"""The page with the default model behind it: what people see first."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

import preimage
from preimage.models import LanguageModel
from support.browser import Browser, needs_browser
from support.pages import ServedPage
from support.serving import Server

pytestmark = [pytest.mark.real_model, needs_browser]
log = logging.getLogger(__name__)
PROMPT = "My password is hunter2."


@pytest.fixture(scope="module")
def shown() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.fixture
def page(browser: Browser, shown: Server) -> ServedPage:
    one = ServedPage(browser, shown.url)
    one.ready()
    return one


def test_a_typed_prompt_is_recovered_live(page: ServedPage) -> None:
    page.put("sipit-seconds", 3)
    page.click("go-prompt")
    page.until("document.querySelector('#out-prompt .notice')")
    first = int(page.tab.run("document.getElementById('out-prompt').dataset.first"))
    page.done()
    log.info("first live token %d ms after the button", first)
    shown = page.text("out-prompt")
    assert "Recovered: this prompt, and no other." in shown
    assert page.tab.run("document.querySelector('#out-prompt pre').textContent") == PROMPT
    assert "SIPIT on our prefix cache" in shown
    assert first < 60_000, "two seconds on a machine that does nothing else"
    page.quiet()


def test_a_bf16_tensor_and_a_bundle_are_inverted(
    page: ServedPage, smollm2: LanguageModel, tmp_path: Path
) -> None:
    states = preimage.capture(smollm2, [PROMPT, "Nobody knows what was in the letter."], [15])
    save_file({"hidden_states.15": states.at(0, 15).bfloat16().contiguous()}, tmp_path / "a.safetensors")
    states.save(tmp_path / "bundle", withhold_ids=True)
    page.click("tab-file")
    page.put("file-layer", "15")
    page.choose([tmp_path / "a.safetensors"])
    page.click("go-file")
    page.until("document.querySelector('#out-file .notice')")
    page.done()
    assert PROMPT in page.text("out-file")
    assert "A likely reading" in page.text("out-file") or "Recovered" in page.text("out-file")
    page.put("file-layer", "")
    page.choose(sorted((tmp_path / "bundle").iterdir()))
    page.click("go-file")
    page.until("document.querySelectorAll('#out-file .notice').length == 2")
    page.done()
    assert page.text("out-file").count("Recovered: this prompt, and no other.") == 2
    assert "Nobody knows what was in the letter." in page.text("out-file")
    page.quiet()


def test_a_long_search_is_cancelled_within_a_block(page: ServedPage) -> None:
    page.click("tab-noise")
    page.click("go-margins")
    page.until("document.getElementById('now').textContent.includes('positions measured')")
    page.click("cancel")
    took = page.done()
    assert "Cancelled." in page.text("out-noise")
    assert took < 30, "less than a second on a machine that does nothing else"
