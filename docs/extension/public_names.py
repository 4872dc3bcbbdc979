"""``.. public-names::``: the reference of ``preimage.__all__``, by the rooms they come from."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import preimage

FIRST, LAST = ("models", "prompts", "states", "inversion"), ("cluster", "errors")  # as people meet them
MAP = Path(__file__).parents[1] / "architecture.md"


def by_room() -> dict[str, list[str]]:
    """Public names under the room their code stands in; between FIRST and LAST in the map's order."""
    rooms = re.findall(r"^\| `(\w+)` \|", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    order = [*FIRST, *(room for room in rooms if room not in FIRST + LAST), *LAST]
    found: dict[str, list[str]] = {}
    for name in preimage.__all__:
        found.setdefault(home(name).split(".")[1], []).append(name)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def home(name: str) -> str:
    """The module a public name comes from; a function that is named like its room is shadowed by it."""
    value = getattr(preimage, name)
    return value.__name__ if inspect.ismodule(value) else str(value.__module__)


def written(room: str, names: list[str]) -> str:
    """A section in reStructuredText: what the room is about, its functions, then its classes."""
    about = (importlib.import_module(f"preimage.{room}").__doc__ or "").strip().splitlines()[0]
    lines = [room.capitalize(), "-" * len(room), "", about, ""]
    classes = [name for name in names if inspect.isclass(getattr(preimage, name))]
    for name in sorted(names, key=lambda name: (name in classes, name.lower())):
        place = f"preimage.{name}.{name}" if inspect.ismodule(getattr(preimage, name)) else f"preimage.{name}"
        lines += [f".. auto{'class' if name in classes else 'function'}:: {place}", ""]
    return "\n".join(lines)


def plain_bars(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """A bar in a docstring is the bar of |h|, and never what reStructuredText makes of it."""
    for index, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[index] = "``".join(parts)


class PublicNames(SphinxDirective):
    """``.. public-names::``."""

    def run(self) -> list[nodes.Node]:
        """A section for every room."""
        self.env.note_reread()
        text = "\n".join(written(room, names) for room, names in by_room().items())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell sphinx."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", plain_bars)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
