"""A page as people see it, in a real browser, from disk; and what it does with hostile texts."""

import time
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
import pytest

from preimage.report import (
    Bullets,
    Cell,
    Column,
    Details,
    Facts,
    Figure,
    Heading,
    Notice,
    Page,
    Paragraph,
    Part,
    Preformatted,
    Section,
    Table,
    Token,
    Tokens,
    save_page,
)
from preimage.report.markup import plainly
from support.browser import Browser, Tab, needs_browser
from support.hostile import HOSTILE

pytestmark = needs_browser

# Everything that could run or load something, and is not the page's own.
_FOREIGN = """
(() => {
  const all = [...document.querySelectorAll("*")];
  const handlers = all.filter((one) => [...one.attributes].some((a) => /^on/.test(a.name)));
  const elements = document.querySelectorAll(
    `iframe, object, embed, img, form, button, input, base, audio, video, animate, meta[http-equiv=refresh],
     body b, body i, body u, svg a, a:not([href^="#section-"]), link:not([href="data:,"]), [autofocus]`);
  const scripts = [...document.scripts].filter((one) => one.type != "application/json").length;
  return [handlers.length, elements.length, scripts, document.styleSheets[0].ownerNode.parentNode.tagName];
})()
"""
# What a reader might do to a page, to everything on it.
_POKE = """
for (const one of document.querySelectorAll("*"))
  for (const kind of ["mouseover", "mousemove", "pointerover", "click", "focus", "mouseout"])
    one.dispatchEvent(new MouseEvent(kind, { bubbles: kind != "focus", clientX: 200, clientY: 200 }));
"""
_DRAWN = """
[...document.querySelectorAll(".plot")].map((plot) => {
  const box = plot.querySelector("svg.main-svg").getBoundingClientRect();
  return [plot.querySelectorAll("svg .trace, svg .hm image").length, box.width > 200, box.height > 200];
})
"""
# The least contrast of all texts that are shown, and whose it is.
_CONTRAST = """
(() => {
  const channels = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = (colour) => {
    const [r, g, b] = channels(colour).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = [Infinity, ""], count = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || one.closest("script, noscript")) continue;
    if (!one.getClientRects().length) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(one.closest("svg") ? style.fill : style.color), light(ground(one))].sort();
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    count += 1;
    if (ratio < least[0]) least = [ratio, one.outerHTML.slice(0, 200)];
  }
  return [...least, count];
})()
"""


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Callable[..., Tab]:
    def open_(page: Page, **screen: object) -> Tab:
        return browser.open(Path(save_page(tmp_path / "a # strange%20name?.html", page)), **screen)  # type: ignore[arg-type]

    return open_


def everywhere(text: str) -> list[Part]:
    """Every part of a page, with a text in every place that takes one."""
    figure = go.Figure(
        go.Scatter(x=[f"{text} at", "other"], y=[1, 2], name=text, text=[text, text], mode="markers+text",
                   customdata=[text, text], hovertemplate=f"{text}%{{customdata}}<extra>{text}</extra>")
    )  # fmt: skip
    figure.add_bar(x=["other"], y=[1], name=f"{text} bar", hovertext=text)
    figure.add_annotation(x=1, y=2, text=text, hovertext=text, showarrow=False)
    figure.update_layout(title=text, legend_title=text)
    figure.update_xaxes(title=text)
    figure.update_yaxes(title=text, ticktext=[text], tickvals=[1])
    return [
        Paragraph(text),
        Heading(text),
        Bullets([text]),
        Notice(text, text, "warn"),
        Table([text, Column(text)], [[text, Cell(text, "bad", text)]], text),
        Figure(figure, text, text),
        Tokens([Token(text, 0.5, text), Token(text, 1.0), Token(text)], text),
        Preformatted(text, text),
        Facts([(text, text)]),
        Details(text, [Paragraph(text)]),
    ]


# --- what people see ----------------------------------------------------------------------------


def test_it_opens_from_disk_and_asks_for_nothing(opened: Callable[..., Tab], sample: Page) -> None:
    tab = opened(sample)
    assert tab.run("document.title") == "What leaks from smollm2"
    assert [url[:8] for url in tab.requests() if not url.startswith("data:")] == ["file:///"]
    assert tab.complaints() == []
    assert tab.run("violations") == []
    drawn = tab.run(_DRAWN)
    assert len(drawn) == 2
    assert all(traces and wide and high for traces, wide, high in drawn)
    assert [traces for traces, *_ in drawn] == [2, 1]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_the_screen_and_is_read_in_both_themes(
    opened: Callable[..., Tab], sample: Page, width: int, dark: bool
) -> None:
    tab = opened(sample, width=width, dark=dark)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("innerWidth") == width
    tab.run("document.querySelector('details').open = true")
    least, whose, count = tab.run(_CONTRAST)
    assert count > 100
    assert least >= 4.5, whose
    backdrop = tab.run("getComputedStyle(document.body).backgroundColor")
    assert backdrop == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    # the wide table scrolls on a phone, in its own box, and by the keyboard
    box = "document.querySelector('.wide')"
    assert tab.run(f"[{box}.scrollWidth > {box}.clientWidth, {box}.tabIndex]") == [width == 360, 0]


def test_figures_follow_the_theme_and_the_width(opened: Callable[..., Tab], sample: Page) -> None:
    tab = opened(sample)
    ink = "getComputedStyle(document.querySelector('.plot .xtitle')).fill"
    width = "document.querySelector('.plot svg').clientWidth"
    light, wide = tab.run(ink), tab.run(width)
    tab.show(360, dark=True)
    tab.run("new Promise((done) => setTimeout(done, 500))")
    assert (light, tab.run(ink)) == ("rgb(28, 33, 40)", "rgb(230, 233, 237)")
    assert tab.run(width) <= 360 < wide


def test_on_paper_it_is_light_open_and_no_wider_than_the_page(
    opened: Callable[..., Tab], sample: Page
) -> None:
    tab = opened(sample, dark=True)
    seen = """(() => [document.querySelector("details").open, document.querySelector(".plot svg").clientWidth,
                      getComputedStyle(document.querySelector(".plot .xtitle")).fill])()"""
    before = tab.run(seen)
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run(seen) == [True, 660, "rgb(28, 33, 40)"]
    tab.run("dispatchEvent(new Event('afterprint'))")
    tab.run("new Promise((done) => setTimeout(done, 300))")
    assert tab.run(seen) == before
    assert before[0] is False


def test_how_sure_a_token_is_is_told_to_the_keyboard(opened: Callable[..., Tab], sample: Page) -> None:
    tab = opened(sample)
    tip = "getComputedStyle(document.querySelectorAll('.tokens .tip')[1]).clipPath"
    assert tab.run(tip) == "inset(50%)"
    for _ in range(30):
        tab.press("Tab")
        if tab.run("document.activeElement.textContent.startsWith(' sat')"):
            break
    assert tab.run(tip) == "none"
    assert tab.run("document.activeElement.innerText") == " sat\n70 %, truth: ' lay'"


def test_without_scripts_figures_are_sentences(opened: Callable[..., Tab], sample: Page) -> None:
    tab = opened(sample, script=False)
    assert tab.complaints() == []
    text = tab.call("Runtime.evaluate", expression="document.body.innerText")["result"]["value"]
    assert "Both fall." in text


# --- hostile texts ------------------------------------------------------------------------------


def test_hostile_texts_are_text_wherever_they_stand(opened: Callable[..., Tab]) -> None:
    page = Page("Title", "About", [Section(name, everywhere(text)) for name, text in HOSTILE.items()])
    tab = opened(page)
    tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    for _ in range(20):
        tab.press("Tab")
    hovered = [hover(tab, number) for number in range(len(HOSTILE))]
    assert all(begins(told, name) for told, name in zip(hovered, HOSTILE, strict=True)), hovered
    assert tab.run("window.pwned") is None
    assert tab.run(_FOREIGN) == [0, 0, 2, "HEAD"]
    assert [url[:8] for url in tab.requests() if not url.startswith("data:")] == ["file:///"]
    assert tab.complaints() == []
    assert tab.run("violations") == []
    assert {traces for traces, *_ in tab.run(_DRAWN)} == {2}
    shown = tab.run("[...document.querySelectorAll('pre')].map((one) => one.textContent)")
    assert shown == [plainly(text) for text in HOSTILE.values()]
    legends = "[...document.querySelectorAll('.plot')].map((p) => p.querySelector('.legendtext').textContent)"
    for name, label in zip(HOSTILE, tab.run(legends), strict=True):
        assert begins(label, name), label
    for width in (360, 1280):
        tab.show(width, dark=False)
        assert tab.run("document.documentElement.scrollWidth") <= width
    tab.run(_POKE)  # last, as plotly's own handlers take no made-up events
    tab.run("new Promise((done) => setTimeout(done, 300))")
    assert tab.run("window.pwned") is None
    assert tab.run(_FOREIGN) == [0, 0, 2, "HEAD"]


def begins(drawn: str, name: str) -> bool:
    """Whether what plotly drew begins as the text does; it folds white space, and breaks lines."""
    squeezed, wanted = ("".join(text.split()) for text in (drawn, plainly(HOSTILE[name])))
    return squeezed.startswith(wanted[:15])


def hover(tab: Tab, number: int) -> str:
    """What the figure of this number says of its first point."""
    plot = f"document.querySelectorAll('.plot')[{number}]"
    box = f"{plot}.querySelector('.scatterlayer .point').getBoundingClientRect()"
    tab.run(f"{plot}.scrollIntoView({{block: 'center'}})")
    tab.point(*tab.run(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2]; }})()"))
    tab.run("new Promise((done) => setTimeout(done, 60))")
    return str(tab.run(f"{plot}.querySelector('.hovertext text.nums').textContent"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_titles(opened: Callable[..., Tab], name: str) -> None:
    text = HOSTILE[name]
    tab = opened(Page(text, text, [Section(text, [])] * 5, footer=text))
    tab.run(_POKE)
    assert tab.run("window.pwned") is None
    assert tab.run(_FOREIGN) == [0, 0, 1, "HEAD"]
    assert tab.complaints() == []
    assert tab.run("document.querySelector('h1').textContent") == plainly(text, 300)
    assert tab.run("document.title").split() == plainly(text, 300).split()
    assert tab.run("document.querySelectorAll('nav a').length") == 5
    tab.show(360, dark=False)
    assert tab.run("document.documentElement.scrollWidth") <= 360
    tab.close()


def test_the_policy_holds_even_if_an_element_slipped_through(
    opened: Callable[..., Tab], sample: Page
) -> None:
    tab = opened(sample)
    tab.run("""(() => {
      const add = (name, set) => document.body.append(Object.assign(document.createElement(name), set));
      add("script", { textContent: "window.pwned = 1" });
      add("script", { src: "http://example.com/a.js" });
      add("img", { src: "http://example.com/a.png" });
      add("iframe", { src: "http://example.com/" });
      add("p", { innerHTML: "<b onclick='window.pwned = 2'></b>" });
      document.body.lastElementChild.firstElementChild.click();
    })()""")
    tried = tab.call(
        "Runtime.evaluate", allowUnsafeEvalBlockedByCSP=False, returnByValue=True, awaitPromise=True,
        expression="""fetch('http://example.com').catch(() => {
            try { eval('1'); return 'ran' } catch { return 'refused' } })""",
    )  # fmt: skip
    assert tried["result"]["value"] == "refused"
    assert tab.run("window.pwned") is None
    expected = {"script-src-elem", "img-src", "frame-src", "script-src-attr", "connect-src", "script-src"}
    limit, refused = time.monotonic() + 20, set[str]()
    while not refused >= expected and time.monotonic() < limit:  # some are told a little later
        refused = {violation.split()[0] for violation in tab.run("violations")}
        time.sleep(0.05)
    assert refused >= expected
