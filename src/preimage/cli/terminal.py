"""What reaches the terminal: json on stdout, text made harmless, progress on stderr."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from preimage.cli.stages import Stages, stage_bar
from preimage.cli.tables import fitted
from preimage.progress import Progress, silent, told_of_stages
from preimage.storage import SCHEMA, dumps

PIPED = 120  # characters of a line where stdout is no terminal
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, format (bidi), surrogates, separators


class OutputError(Exception):
    """Stdout cannot be written; ``reason`` is the system's error."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Stdout:
    """Stdout whose errors are known as such: they are no OSError that something else might have had."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or raise OutputError."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        """Have everything written, or raise OutputError."""
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from error


def printable(text: str) -> str:
    """Text with everything that could steer a terminal shown as an escape instead."""
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char
        for char in text
    )


def print_json(document: dict[str, Any]) -> None:
    """One json document on stdout."""
    print(dumps(document), flush=True)


def print_result(command: str, document: dict[str, Any]) -> None:
    """The one document of ``--json`` of a command that was done."""
    print_json({"schema": SCHEMA, "command": command, **document})


def print_either(json: bool, command: str, document: dict[str, Any], *lines: str) -> None:
    """What a command ends with: the document of ``--json``, else lines."""
    if json:
        print_result(command, document)
    else:
        print_lines(*lines)


def print_lines(*lines: str) -> None:
    """Plain lines on stdout, on a terminal folded between words."""
    shown = [printable(line) for line in lines]
    if sys.stdout.isatty():
        console = Console()
        shown = [part for line in shown for part in _folded(line, console)]
    print("\n".join(shown), flush=True)


def print_whole(*lines: str) -> None:
    """Lines to be copied, commands and paths: never folded."""
    print("\n".join(printable(line) for line in lines), flush=True)


def print_table(
    title: str, columns: list[str], rows: list[list[str]], *, prose: Collection[str] = ()
) -> None:
    """A table on stdout; nothing in it is read as markup.

    ``prose`` names the columns whose cells may be folded between words; those of all others are kept whole.
    Where that is too wide there are several tables, or a list (:mod:`preimage.cli.tables`).
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED)
    cells = [[printable(cell) for cell in row] for row in rows]
    console.print(Text(printable(title), style="italic"))
    for number, table in enumerate(fitted(columns, cells, prose, console.width)):
        if number:
            console.print()
        console.print(table)


def _folded(line: str, console: Console) -> list[str]:
    """A line in parts that fit; what continues it stands under its beginning."""
    body = line.lstrip(" ")
    indent = len(line) - len(body)
    hang = " " * (indent + 2 * body.startswith("- "))
    if not body or cell_len(line) <= console.width or len(hang) > console.width // 2:
        return [line]
    parts = Text(body).wrap(console, console.width - len(hang))
    return [(hang if number else line[:indent]) + part.plain.rstrip() for number, part in enumerate(parts)]


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr where that is a terminal, nothing otherwise.

    It names the stage, counts its pieces and says how long they took and how long the rest should take. A
    stage of one piece has no such end; it is named, and its time runs. Parts of set-up that say what begins
    (:func:`preimage.progress.stage`) are stages too.
    """
    console = Console(stderr=True)
    if sys.stderr is None or not console.is_terminal:
        yield silent
        return
    with stage_bar(console) as bar:
        report = Stages(bar, printable).report
        with told_of_stages(report):
            yield report


@contextmanager
def naming(note: str) -> Iterator[None]:
    """While something is done that does not report itself, such as loading, a terminal says what it is."""
    with progress_bar() as progress:
        progress(0, 1, note)
        yield
