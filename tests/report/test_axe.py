"""Pages as axe-core sees them: nothing serious on ours, and what is planted is found."""

from pathlib import Path

import pytest

from preimage.report import Page, save_page
from support.axe import serious_violations
from support.browser import Browser, needs_browser

pytestmark = needs_browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_on_a_page_keeps_people_out(
    browser: Browser, sample: Page, tmp_path: Path, width: int, dark: bool
) -> None:
    tab = browser.open(Path(save_page(tmp_path / "page.html", sample)), width, dark)
    assert serious_violations(tab) == []
    tab.close()


def test_what_keeps_people_out_is_found(browser: Browser, sample: Page, tmp_path: Path) -> None:
    tab = browser.open(Path(save_page(tmp_path / "page.html", sample)))
    tab.run("""(() => {
      document.documentElement.removeAttribute("lang");
      document.querySelector("main").insertAdjacentHTML("beforeend",
        "<details><p style='color: #999; background: #fff'>pale</p><button></button></details>");
    })()""")
    rules = {line.split()[0] for line in serious_violations(tab)}
    assert rules == {"html-has-lang", "color-contrast", "button-name"}
    tab.close()
