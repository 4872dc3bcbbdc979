"""``{picture} NAME``: a drawing of ``docs/pictures`` within the page, in the page's own colours.

A drawing without words for those who do not see it (``<title>`` and ``<desc>``) is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PICTURES = Path(__file__).parents[1] / "pictures"


class Picture(SphinxDirective):
    """``{picture} NAME``; what stands in it is the caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The drawing and its caption."""
        name = self.arguments[0]
        path = PICTURES / f"{name}.svg"
        self.env.note_dependency(str(path))
        drawn = path.read_text(encoding="utf-8")
        for part in ("title", "desc"):
            if not re.search(rf"<{part}>[^<]{{8,}}</{part}>", drawn):
                raise self.error(f"{path.name} has no <{part}>: say in words what it shows.")
            drawn = drawn.replace(f"<{part}>", f'<{part} id="{name}-{part}">')
        drawn = drawn.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title {name}-desc" ', 1)
        caption = nodes.container(classes=["picture-caption"])
        caption += self.parse_content_to_nodes()
        around = nodes.container(classes=["picture"])
        around += [nodes.raw("", drawn, format="html"), caption]
        return [around]


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell sphinx."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
