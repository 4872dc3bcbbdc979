"""axe-core, which finds what keeps people from a page: names, roles, contrast, order, the keyboard's way.

It is apart from the rest, in the environment's own folder (see the Makefile), and nothing of it is part of a
page that is tested: the browser is handed it from outside, past the page's policy.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from support.browser import Tab

HOME = Path(sys.prefix) / "axe"
_GRAVE = ("serious", "critical")
_OPENED = "document.querySelectorAll('details').forEach((one) => (one.open = true))"
_FOUND = """
axe.run(document, { resultTypes: ["violations"] }).then((all) => all.violations.flatMap((rule) =>
  rule.nodes.map((node) => [node.impact, rule.id, rule.help, node.target.join(" "), node.html])))
"""
_SHOWN = 200  # letters of an element


def serious_violations(tab: Tab) -> list[str]:
    """What axe-core finds serious or critical on a page as it is shown, one line an element.

    Details are opened first, and stay open: what is folded away is not looked at.
    """
    tab.run(_OPENED)
    tab.run(_script())
    found: list[list[str]] = tab.run(_FOUND)
    return [
        f"{rule} ({impact}): {help_}; {target}: {json.dumps(html[:_SHOWN], ensure_ascii=False)}"
        for impact, rule, help_, target, html in found
        if impact in _GRAVE
    ]


@cache
def _script() -> str:
    script = HOME / "axe_playwright_python" / "axe.min.js"
    assert script.is_file(), f"{script} is missing; run `make setup`"
    return f"{script.read_text(encoding='utf-8')}\n0"  # no value comes back
