"""What a notebook shows of a result: html of ours alone, whatever texts are in it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preimage
from preimage.markup import plainly
from preimage.states import States
from preimage.storage import Saved
from preimage.views import Piece, percent, table, tokens, view
from support.drawn_results import made, recipes, result_types
from support.hostile import HOSTILE
from support.shown_results import IDS, results, saying, spoken
from support.tiny import build

KINDS = [kind for kind in result_types() if issubclass(kind, Saved) and kind.__name__ != "LeakCell"]
OURS = {"div", "span", "table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "wbr"}


class Reader(HTMLParser):
    """The elements and attributes of some html, and its text; what is not closed in order is an error."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.told: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in OURS, tag
        for name, value in attrs:
            assert name in ("style", "title", "scope", "class"), name
            assert name != "class" or value == "tex2jax_ignore mathjax_ignore"
            assert name != "style" or not {"url(", "@", "\\"} & set(value or "")
            if name == "title":
                self.told.append(value or "")
        if tag != "wbr":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


@pytest.fixture(scope="session")
def shown() -> dict[str, Any]:
    return results()


def test_every_result_has_a_view(shown: dict[str, Any]) -> None:
    assert {kind.__name__ for kind in KINDS} <= {name.partition(" ")[0] for name in shown}
    for name, result in shown.items():
        html = Reader(result._repr_html_())
        assert len(html.text) > 40, name
        assert "object at 0x" not in html.text, name
        line = repr(result)
        assert line.startswith("<"), name
        assert len(line) < 200, name
        assert "\n" not in line, name


def test_a_recovered_prompt_is_shown_token_by_token(shown: dict[str, Any]) -> None:
    found = shown["Inversion"]
    assert found.reading.tokens == (" w7", " w3", " w9", " w4")
    html = Reader(found._repr_html_())
    assert "recovered at layer 2 by fast" in html.text
    assert "✓" in html.text
    assert "".join(found.reading.tokens) in html.text
    assert len(html.told) == 4
    first = found.positions[0]
    assert html.told[0].startswith("100 % sure, ")
    assert f"nearest other token tried {first.runner_up_distance:.4g}" in html.told[0]
    lost = Reader(shown["Inversion of noise"]._repr_html_())
    assert "✕ not_recovered" in lost.text
    assert shown["Inversion of noise"].reason in lost.text
    assert not any(told.startswith("100 %") for told in lost.told)
    unspoken = shown["Inversion without text"]
    assert unspoken.reading.tokens == ()
    assert Reader(unspoken._repr_html_()).text.count("7") >= 1


def test_a_margin_that_was_proved_is_told() -> None:
    states = preimage.capture(spoken(), IDS[:1], layers=1)
    (proved,) = preimage.invert(spoken(), states, prove=True)
    told = Reader(proved._repr_html_()).told
    assert all(
        f"margin {position.margin:.4g} (proved)" in one
        for position, one in zip(proved.positions, told, strict=True)
    )


@pytest.mark.real_model
def test_tokens_spelled_one_by_one_are_the_text(smollm2: Any) -> None:
    ids = smollm2.tokenizer("Tabs\tand  spaces,\nnaïve 日本 🙂 ok")["input_ids"]
    pieces = smollm2.spell(ids)
    assert len(pieces) == len(ids)
    whole = smollm2.decode(ids)
    if "\ufffd" not in "".join(pieces):
        assert "".join(pieces) == whole
    plain = smollm2.tokenizer("The password is hunter2.")["input_ids"]
    assert "".join(smollm2.spell(plain)) == "The password is hunter2."


def test_the_space_before_a_word_is_kept_where_a_tokenizer_leaves_out_the_first() -> None:
    class Stripping:
        bos_token_id = None

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(f" w{token}" for token in ids).removeprefix(" ")

    model = preimage.load(build("llama"), tokenizer=Stripping())
    assert model.spell([3, 4, 3]) == (" w3", " w4", " w3")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_in_a_result_it_has_a_view(kind: Any, data: st.DataObject) -> None:
    result = made(data.draw(recipes(kind)))
    Reader(result._repr_html_())
    assert "\n" not in repr(result)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_text_in_every_view(shown: dict[str, Any], name: str) -> None:  # W1
    text = HOSTILE[name]
    begins = plainly(text, 20).replace("\r", "").partition("\n")[0].partition(" […]")[0][:20]
    for of, result in shown.items():
        if of in ("States", "LanguageModel"):
            continue
        hostile = saying(result, text)
        html = hostile._repr_html_()
        html.encode()
        assert len(html) < 3_000_000
        assert begins in Reader(html).text or of in ("Geometry", "Trajectory"), of  # which show numbers
        assert len(repr(hostile)) < 10_000  # what is spelled out is six letters for one
        assert repr(hostile).isprintable(), of


def test_hostile_names_of_models_and_states(shown: dict[str, Any]) -> None:
    for text in HOSTILE.values():
        model = preimage.load(build("llama"))
        model.name = text
        Reader(model._repr_html_())
        states = shown["States"]
        named = States(
            states.layout, states.store, token_ids=None, model={"name": text}, noise_floor={},
            dtype=states.dtype,
        )  # fmt: skip
        Reader(named._repr_html_())


def test_much_is_cut_and_said_to_be() -> None:
    rows = [{"row": number} for number in range(100)]
    text = Reader(table(rows)).text
    assert "… 40 more rows" in text
    many = [Piece("a", 1.0, "")] * 1500
    assert "[…] 500 more tokens" in Reader(tokens(many)).text
    assert Reader(table([])).text == ""
    assert Reader(view("x" * 5000)).text.endswith("3,800 more characters are not shown")


def test_no_doubt_is_rounded_away() -> None:
    assert [percent(share) for share in (1, 0.99999, 0.5, 0.0001, 0)] == [
        "100 %", "over 99.9 %", "50 %", "under 0.1 %", "0 %",
    ]  # fmt: skip
