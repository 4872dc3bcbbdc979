"""Pages for the keyboard and for screen readers, where sphinx and the theme leave something to be done.

What scrolls sideways on a narrow screen, a wide table or a long line of code, can be scrolled by keyboard.
The captions of the navigation are headings of a level. Parameters on lines of their own are plain lines.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_SCROLLING = re.compile(r'<(pre|div class="table-wrapper[^"]*")>')
_PARAMETERS = re.compile(r'(<span class="sig-paren">\(</span>)\s*<dl>(.*?)</dl>', re.DOTALL)
_CAPTION = 'class="caption" role="heading"'


def reachable(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Give what scrolls a place in the order of the tab key, and captions a level."""
    if "body" in context:
        body = _SCROLLING.sub(r'<\1 tabindex="0">', context["body"])
        context["body"] = _PARAMETERS.sub(plain_parameters, body)
    tree = "furo_navigation_tree"
    if tree in context:
        context[tree] = context[tree].replace(_CAPTION, f'{_CAPTION} aria-level="2"')


def plain_parameters(found: re.Match[str]) -> str:
    """The parameters of a long signature: lines, and no list of definitions without words to be defined."""
    lines = found[2].replace("<dd>", "<div>").replace("</dd>", "</div>")
    return f'{found[1]}<div class="sig-parameters">{lines}</div>'


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell sphinx."""
    app.connect("html-page-context", reachable, priority=900)  # after the theme has wrapped the tables
    return {"parallel_read_safe": True, "parallel_write_safe": True}
