"""A page as text: what is in it is shown, and nothing of it becomes html."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preimage.errors import UnwritableError
from preimage.markup import LONG, SHORT, joined, plainly, tag, visible
from preimage.report import (
    Cell,
    Figure,
    Notice,
    Page,
    Paragraph,
    Part,
    Section,
    Table,
    Token,
    Tokens,
    render,
    save_page,
)
from preimage.report.plots import PALETTE, plot_of, plotly_script, script_json, themes
from support.refusing import refused

ANY = st.text(st.characters(exclude_categories=()))  # lone surrogates too


class Reader(HTMLParser):
    """Elements, attributes and text, as a browser finds them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def one_part(part: Part, title: str = "Title") -> str:
    return render(Page(title, "About", [Section("Chapter", [part])]))


# --- text ---------------------------------------------------------------------------------------


@given(ANY)
def test_any_text_is_shown_and_nothing_else(text: str) -> None:
    read = Reader(visible(text))
    assert set(read.elements) <= {"span", "wbr"}
    assert set(read.attributes) <= {"class"}
    assert read.text == plainly(text)
    read.text.encode()  # no lone surrogate is left
    assert all(character.isprintable() or character in "\n\t" for character in read.text)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a\0b", "a␀b"),
        ("\x1b[31mred", "␛[31mred"),
        ("a\r\nb", "a␍\nb"),
        ("\x7f", "␡"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066\u2069\u200f", "\\u2066\\u2069\\u200f"),
        ("a\u2028b", "a\\u2028b"),
        ("\ud800", "\\ud800"),
        ("a\u00a0b\u200b", "a\\xa0b\\u200b"),
        ("\U000e0041", "\\U000e0041"),  # a letter of the tag block: smuggled instructions
        ("\U000e0100", "\\U000e0100"),
        ("\u3164", "\\u3164"),
        ("e" + 6 * "\u0301", "e" + 4 * "\u0301" + 2 * "\\u0301"),
        ("é ü ñ 日本語 עברית 🙂 tab\tline\n", "é ü ñ 日本語 עברית 🙂 tab\tline\n"),
        ("<b>&amp;{{7*7}}", "<b>&amp;{{7*7}}"),
    ],
)
def test_what_cannot_be_seen_is_spelled_out(given: str, shown: str) -> None:
    assert plainly(given) == shown
    assert Reader(visible(given)).text == shown


def test_what_is_too_long_is_cut_and_says_so() -> None:
    shown = plainly("a" * 1_000_000)
    assert shown.startswith("a" * LONG + " […]")
    assert "980,000 more characters" in shown
    assert len(shown) < LONG + 100
    assert plainly("a" * LONG) == "a" * LONG
    assert "700 more characters" in visible("a" * 1000, SHORT)


def test_a_long_word_may_break_but_not_within_an_escape() -> None:
    assert visible("<" * 61) == "&lt;" * 60 + "<wbr>&lt;"
    assert "<wbr>" not in visible("a b " * 100 + "e\u0301" * 100)


def test_only_markup_is_not_escaped() -> None:
    inner = tag("b", "x < y")
    assert joined("<i>", inner, None, "") == "&lt;i&gt;<b>x &lt; y</b>"
    assert tag("p", class_="a\"b'", aria_label=None) == '<p class="a&quot;b&#x27;"></p>'


# --- the page -----------------------------------------------------------------------------------


@given(ANY)
def test_a_page_of_any_text_is_utf8_and_has_the_same_elements(text: str) -> None:
    def elements(title: str, content: str) -> list[str]:
        table = Table(["a", "b"], [[content, Cell(content, "bad", content)]], content)
        html = render(Page(title, content, [Section(content, [table, Notice(content, content)])]))
        html.encode()
        return [element for element in Reader(html).elements if element not in ("span", "wbr")]

    usual = elements("x", "x") if text else elements("x", "")
    assert elements(text or "x", text) == usual


def test_scripts_run_by_their_hash_alone() -> None:
    for part, scripts in ((Paragraph("x"), 1), (Figure(go.Figure(), "nothing"), 2)):
        html = one_part(part)
        policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
        assert len(policy) == 1
        assert "default-src 'none'" in policy[0]
        assert not re.search(r"unsafe-eval|script-src[^;]*unsafe|https?:|\*", policy[0])
        written = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in written]
        assert re.findall(r"'sha256-([^']*)'", policy[0]) == hashes
        assert len(hashes) == scripts
        assert html.index("Content-Security-Policy") < html.index("<script")
    assert "plotly" not in one_part(Paragraph("x"))


def test_contents_where_there_are_many_chapters(sample: Page) -> None:
    assert '<a href="#section-6">Provenance</a>' in render(sample)
    assert "<nav" not in render(Page("a", "b", sample.sections[:4]))


def test_headings_are_in_order_and_tables_have_their_heads(sample: Page) -> None:
    html = render(sample)
    levels = [int(level) for level in re.findall(r"<h(\d)", html)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    assert html.count('scope="col"') == 12
    assert html.count('scope="row"') == 6
    assert html.count("<caption") == 1
    names = re.findall(r' id="([^"]*)"', html)
    assert len(names) == len(set(names))


def test_a_tint_is_never_alone() -> None:
    html = one_part(Table(["a"], [[Cell("x", "bad")], [Cell("y", "good")], [Cell("z", "warn")]], "t"))
    assert [html.count(f'role="img" aria-label="{word}"') for word in ("bad", "good", "caution")] == [1, 1, 1]


def test_a_table_without_rows_says_so_and_a_row_too_short_is_a_mistake() -> None:
    assert '<td colspan="2">none</td>' in one_part(Table(["a", "b"], [], "t"))
    with pytest.raises(ValueError, match="Row 1 has 1 cells for 2"):
        Table(["a", "b"], [["1", "2"], ["3"]], "t")


@pytest.mark.parametrize(
    ("confidence", "said"),
    [(1.0, "100 %"), (0.99996, "over 99.9 %"), (0.834, "83.4 %"), (1e-9, "under 0.1 %"), (0.0, "0 %")],
)
def test_confidence_is_not_rounded_to_certainty(confidence: float, said: str) -> None:
    assert f"{said}, noted" in one_part(Tokens([Token("x", confidence, "noted")], "t"))


def test_tokens_show_their_line_ends_and_what_is_empty() -> None:
    read = Reader(one_part(Tokens([Token("a\n", 1.0), Token("", 1.0), Token("b", None)], "t"))).text
    assert "a↵\n(empty)b" in read
    assert "not read" in read
    assert "10 more tokens" in one_part(Tokens([Token("a", 1.0)] * 5010, "t"))


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    page = Page("\ud800", "", [])
    assert save_page(tmp_path / "new" / "page.html", page).read_text(encoding="utf-8") == render(page)
    (tmp_path / "file").touch()
    refused(UnwritableError, lambda: save_page(tmp_path / "file" / "page.html", page))


def test_a_large_report_stays_under_8_mb() -> None:
    table = Table([f"c{i}" for i in range(12)], [[Cell("98.2 %", "bad", "2.1 s")] * 12] * 60, "t")
    figure = go.Figure([go.Scatter(x=list(range(500)), y=list(range(500))) for _ in range(6)])
    text = Tokens([Token(" token", 0.9, "second: other")] * 200, "t")
    parts = [table, Figure(figure, "a"), Figure(figure, "b"), *[text] * 100]
    assert len(render(Page("t", "s", [Section("c", parts)])).encode()) < 8_000_000


# --- figures ------------------------------------------------------------------------------------


def test_strings_of_figures_are_text() -> None:
    figure = go.Figure(
        go.Bar(
            x=["<b>&amp;</b>", "a\nb", "</script>"], y=[1, 2, 3], hovertemplate="<i>%{x}<br><extra></extra>"
        )
    )
    figure.update_layout(title={"text": "<u>\0"}, width=3000, template="plotly_dark")
    content, title, _, height = plot_of(figure)
    assert title == "<u>\0"  # which the page escapes itself
    assert "<" not in content
    assert "\\u0026lt;b\\u0026gt;\\u0026amp;amp;\\u0026lt;/b\\u0026gt;" in content
    assert "a\\u003cbr\\u003eb" in content
    assert "\\u0026lt;i\\u0026gt;%{x}\\u003cbr\\u003e\\u003cextra\\u003e\\u003c/extra\\u003e" in content
    assert not re.search('"width"|"template"', content)
    assert '"height":420' in content
    assert height == 420


def test_labels_of_figures_leave_room_to_the_figure() -> None:
    figure = go.Figure(go.Scatter(x=["a" * 1000], y=[1], name=" ".join(["word"] * 20)))
    figure.update_xaxes(title="t" * 100, type="log")
    data = json.loads(plot_of(figure).json)
    labels = [data["data"][0]["name"], data["data"][0]["x"][0], data["layout"]["xaxis"]["title"]["text"]]
    assert all(len(line) <= 36 for label in labels for line in label.split("<br>"))
    assert labels[0].replace("<br>", " ") == " ".join(["word"] * 20)
    assert labels[1].count("<br>") == 4
    assert "…" in labels[1]


def test_arrays_of_figures_are_left_alone() -> None:
    import numpy as np

    content, *_ = plot_of(go.Figure(go.Scatter(x=np.arange(5000.0), y=np.full(5000, np.nan))))
    (x, y) = re.findall(r'"bdata":"([^"]*)"', content)
    assert np.frombuffer(base64.b64decode(x), "f8").tolist() == list(range(5000))
    assert np.isnan(np.frombuffer(base64.b64decode(y), "f8")).all()


def test_nothing_leaves_a_script_element() -> None:
    assert "</script" not in plotly_script().lower()
    assert "<!--" not in plotly_script()
    assert script_json({"a": "</script><!--\u2028\ud800&"}).isascii()
    assert not re.search("[<>&]", script_json({"a": "</script><!--&"}) + themes())


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("paper", ["#ffffff", "#14171c"])
def test_colours_of_curves_are_seen_on_light_and_dark(paper: str) -> None:
    for colour in PALETTE:
        low, high = sorted((luminance(colour), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_themes_of_figures_have_the_colours_of_the_page() -> None:
    css = one_part(Paragraph("x"))
    for colour in re.findall(r'"(?:color|gridcolor|linecolor|bgcolor)":"(#\w+)"', themes()):
        assert f": {colour};" in css
