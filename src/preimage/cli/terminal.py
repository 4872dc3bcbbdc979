"""What reaches the terminal: json on stdout, text made harmless, progress on stderr."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from preimage.progress import Progress
from preimage.storage import SCHEMA, dumps

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
    """Plain lines on stdout."""
    print("\n".join(printable(line) for line in lines), flush=True)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table on stdout; nothing in it is read as markup."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr where that is a terminal, nothing otherwise."""
    console = Console(stderr=True)
    if sys.stderr is None or not console.is_terminal:
        yield lambda done, total, note: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, description=note)

        yield report
