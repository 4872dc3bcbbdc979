"""Directives that describe commands from the commands themselves, so that no list of options can go stale.

``{command} NAME`` is what one command takes; ``{command-list}`` names all of them; ``{other-commands}``
describes those that have no page of their own in ``docs/commands``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import typer
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from preimage.cli.app import app

PAGES = Path(__file__).parents[1] / "commands"


def commands() -> dict[str, Any]:
    """Every command of ``preimage``, by its name, in the order of ``--help``."""
    return {name: one for name, one in typer.main.get_command(app).commands.items() if not one.hidden}


def pages() -> set[str]:
    """Commands that have a page."""
    return {path.stem for path in PAGES.glob("*.md")}


def short(command: Any) -> str:
    """What a command says of itself, in one sentence or two, as ``preimage --help`` would in full."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def paragraphs(text: str) -> list[nodes.Node]:
    """A help text; what is an option in it is shown as code."""
    return [nodes.paragraph("", "", *words(" ".join(one.split()))) for one in text.split("\n\n") if one]


def words(text: str) -> list[nodes.Node]:
    """A line of help, its options as code."""
    found: list[nodes.Node] = []
    for word in text.split(" "):
        bare = word.rstrip(".,;:)")
        if bare.startswith("--") and len(bare) > 2:
            found += [nodes.literal(text=bare), nodes.Text(word[len(bare) :] + " ")]
        else:
            found.append(nodes.Text(word + " "))
    return found


def table(head: tuple[str, str], rows: list[tuple[nodes.Node, list[nodes.Node]]], name: str) -> nodes.table:
    """Two columns, with a head."""
    made = nodes.table(classes=["options", name])
    group = nodes.tgroup(cols=2)
    group += [nodes.colspec(colwidth=30), nodes.colspec(colwidth=70)]
    top = nodes.row("", *(nodes.entry("", nodes.paragraph(text=one)) for one in head))
    group += nodes.thead("", top)
    body = nodes.tbody()
    for first, second in rows:
        cells = (nodes.paragraph("", "", first), nodes.paragraph("", "", *second))
        body += nodes.row("", *(nodes.entry("", cell) for cell in cells))
    group += body
    made += group
    return made


def described(command: Any, name: str) -> list[nodes.Node]:
    """Usage, arguments and options of one command, in the words of its ``--help``."""
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    found: list[nodes.Node] = [
        *paragraphs(command.help or ""),
        nodes.literal_block(usage, usage, language="text"),
    ]
    kinds = {"argument": ("argument", "what it is"), "option": ("option", "what it does")}
    for kind, head in kinds.items():
        asked = [one for one in command.get_params(context) if one.param_type_name == kind]
        records = [one.get_help_record(context) for one in asked if not getattr(one, "hidden", False)]
        rows = [(nodes.literal(text=record[0]), words(record[1])) for record in records if record]
        if rows:
            found.append(table(head, rows, f"{kind}s"))
    return found


def whole(command: Any, name: str) -> list[nodes.Node]:
    """A command, or a group: what it says, and a section for each of its commands."""
    parts = getattr(command, "commands", None)
    if parts is None:
        return described(command, name)
    found = paragraphs(command.help or "")
    for part, one in parts.items():
        if not one.hidden:
            found.append(section(f"{name} {part}", *described(one, f"{name} {part}")))
    return found


def section(title: str, *content: nodes.Node) -> nodes.section:
    """A section that can be linked to by its title."""
    made = nodes.section(ids=[nodes.make_id(title)], names=[title])
    made += nodes.title("", "", nodes.literal(text=title))
    made += list(content)
    return made


class CommandDirective(SphinxDirective):
    """``{command} NAME``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """What the command takes."""
        self.env.note_dependency(__file__)
        found = commands().get(self.arguments[0])
        if found is None:
            raise self.error(f"There is no command {self.arguments[0]!r}; its page should go.")
        return whole(found, f"preimage {self.arguments[0]}")


class OtherCommands(SphinxDirective):
    """``{other-commands}``."""

    def run(self) -> list[nodes.Node]:
        """A section for every command without a page."""
        self.env.note_reread()
        left = [(name, one) for name, one in commands().items() if name not in pages()]
        if not left:
            return [nodes.paragraph(text="Every command has a page of its own.")]
        return [section(f"preimage {name}", *whole(one, f"preimage {name}")) for name, one in left]


class CommandList(SphinxDirective):
    """``{command-list}``."""

    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Every command, with a link to where it is described."""
        self.env.note_reread()
        rows = []
        for name, one in commands().items():
            target = f"/commands/{name if name in pages() else 'others'}"
            link = addnodes.pending_xref(
                "", nodes.literal(text=f"preimage {name}"), refdomain="std", reftype="doc", reftarget=target,
                refexplicit=True, refdoc=self.env.docname, refwarn=True,
            )  # fmt: skip
            rows.append((link, words(short(one))))
        return [table(("command", "what it does"), rows, "commands")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell sphinx."""
    app.add_directive("command", CommandDirective)
    app.add_directive("other-commands", OtherCommands)
    app.add_directive("command-list", CommandList)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
