"""Terminals of 60, 80 and 120 columns: no number and no status is broken over lines, in any table.

Every command is run on a terminal of 60 columns, and its tables are printed again on wider ones.
"""

from __future__ import annotations

import ast
import io
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import preimage
from preimage.cli import main, terminal
from preimage.cli.stages import Stages, stage_bar
from preimage.cli.tables import LONG, fitted
from support.commands import on_a_terminal
from support.folders import make_folder

WIDTHS = (60, 80, 120)
STYLE = re.compile(r"\x1b\[[\d;]*m")  # bold is no colour: NO_COLOR leaves it
NUMBER = re.compile(r"(?<!\w)[-+]?\d[\d.,]*(?:e[-+]?\d+)?%?(?!\w)")  # digits within a hash are none
Row = Sequence[str]


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Tables:
    """Every table that was printed, with its rows."""

    def __init__(self) -> None:
        self.printed: list[tuple[Row, Sequence[Row], Collection[str]]] = []

    def fitted(
        self, columns: Row, rows: Sequence[Row], prose: Collection[str], width: int
    ) -> Iterator[object]:
        self.printed.append((columns, rows, prose))
        return fitted(columns, rows, prose, width)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    kept = Tables()
    monkeypatch.setattr(terminal, "fitted", kept.fitted)
    monkeypatch.setenv("TERM", "xterm")  # rich gives a dumb one 80 columns, whatever it has
    return kept


@pytest.fixture
def typed(tables: Tables, monkeypatch: pytest.MonkeyPatch, model: str) -> Callable[..., str]:
    def run(*argv: object) -> str:
        shown = Terminal()
        monkeypatch.setattr(sys, "stdout", shown)
        monkeypatch.setenv("COLUMNS", str(WIDTHS[0]))
        assert main([str(one) for one in argv]) in (0, 1)
        return STYLE.sub("", shown.getvalue())

    return run


def drawn(columns: Row, rows: Sequence[Row], prose: Collection[str], width: int) -> list[str]:
    file = io.StringIO()
    console = Console(width=width, file=file, color_system=None)
    for table in fitted(columns, rows, prose, width):
        console.print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def require_whole(
    columns: Row, rows: Sequence[Row], prose: Collection[str], lines: list[str], width: int
) -> None:
    """Every cell that is no prose stands on one line, and so does every number of one that is."""
    assert max(map(cell_len, lines), default=0) <= width
    shown = [" ".join(line.split()) for line in lines]
    for row in rows:
        for column, cell in zip(columns, row, strict=True):
            whole = " ".join(cell.split())
            if column not in prose and len(cell) <= LONG:
                assert any(whole in line for line in shown), (column, cell, lines)
            for number in NUMBER.findall(cell):
                assert any(number in line for line in shown), (column, cell, number, lines)


TEXT = ["--text", "the cat sat on 12 mats", "--text", "a dog of 4.5 years", "--text", "the cats"]
FEW = ["--model", "MODEL", "--count", "9"]
COMMANDS: dict[str, list[str]] = {
    "demo": ["demo", "--model", "ROOMY", "--device", "cpu"],
    "doctor": ["doctor"],
    "models": ["models"],
    "capture --plan": ["capture", "--model", "MODEL", *TEXT, "--out", "PLACE", "--plan"],
    "invert": ["invert", "--model", "MODEL", *TEXT, "--layer", "1", "--out", "PLACE"],
    "invert --prove": ["invert", "--model", "MODEL", *TEXT, "--layer", "1", "--prove"],
    "lens list": ["lens", "list"],
    "leak": ["leak", "MODEL", *TEXT, "--layers", "1,2", "--exposures", "float32,int8"],
    "leak FILES": ["leak", "FILES", "--model", "MODEL"],
    "collisions": ["collisions", *FEW, "--length", "6", "--layers", "1,2", "--out", "PLACE"],
    "continuations": ["continuations", "--model", "MODEL", "--text", "the"],
    "geometry": ["geometry", *FEW, "--length", "4,6", "--bits", "8", "--subsets", "0", "--out", "PLACE"],
    "trajectory": ["trajectory", "--size", "32,1,2", "--steps", "2", "--checkpoints", "2", "--batch", "2",
                   "--window", "16", "--probes", "20", "--length", "8", "--vocabulary", "300",
                   "--text", "TEXTS"],
    "theory optimiser": ["theory", "optimiser", "--steps", "1"],
    "reproduce --list": ["reproduce", "--list"],
    "reproduce": ["reproduce", "depth", "--model", "MODEL", "--count", "2", "--length", "4",
                  "--prompts", "random", "--layers", "1", "--out", "PLACE"],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_no_number_and_no_status_is_broken(
    name: str,
    typed: Callable[..., str],
    tables: Tables,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    np.save(tmp_path / "states.npy", np.zeros((1, 2, 32), np.float32))
    texts = "\n".join(f"line {number} of a text that is learned, {number**2}" for number in range(400))
    (tmp_path / "texts.txt").write_text(texts)
    (tmp_path / "log.jsonl").write_text('{"prompt": "call 0041 22 767 6111 or write to somebody"}\n')
    meant = {"MODEL": model, "PLACE": str(tmp_path / "run"), "TEXTS": str(tmp_path / "texts.txt"),
             "FILES": str(tmp_path / "log.jsonl")}  # fmt: skip
    if name == "demo":
        monkeypatch.setattr(
            "preimage.cli.demo._PROMPTS", ("My password is hunter2.", "2 rue des Lilas, Lyon")
        )
        meant["ROOMY"] = str(make_folder(tmp_path / "roomy", max_position_embeddings=512))
    lines = typed(*(meant.get(one, one) for one in COMMANDS[name])).splitlines()
    copied = [line for line in lines if line.startswith("Open ")]  # a path to copy stays whole
    assert len(copied) == ("PLACE" in COMMANDS[name] and "--plan" not in COMMANDS[name])
    assert all(Path(line.removeprefix("Open ")).is_file() for line in copied)
    shown = [line for line in lines if line not in copied]
    assert tables.printed
    for columns, rows, prose in tables.printed:
        require_whole(columns, rows, prose, shown, WIDTHS[0])
        for width in WIDTHS:
            require_whole(columns, rows, prose, drawn(columns, rows, prose, width), width)


def test_every_command_that_prints_a_table_is_among_them() -> None:
    """Modules of the command line that call print_table, and nobody who draws one in another way."""
    folder = Path(preimage.__file__).parent / "cli"
    callers = set()
    for path in folder.glob("*.py"):
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
        ]
        called = {func.id for func in calls if isinstance(func, ast.Name)}
        if "print_table" in called:
            callers.add(path.stem)
        assert "Table" not in called or path.stem == "tables"
    tried = {argv[0] for argv in COMMANDS.values()} | {"elsewhere"}  # --plan
    assert callers <= tried, f"add {callers - tried} to COMMANDS"


CELLS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(lambda one: f"{one:.4g}"),
    st.integers(0, 10**9).map(lambda one: f"{one:,}"),
    st.sampled_from(["recovered", "not_recovered", "ambiguous", "-", "", "0.97 s", "1.2e-05 to 3.4e+07"]),
)
PROSE = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=300)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 16), st.integers(1, 4), st.sampled_from([40, *WIDTHS]))
def test_tables_of_any_numbers_fit(data: st.DataObject, wide: int, high: int, across: int) -> None:
    columns = [f"column {number}" for number in range(wide)]
    rows = [[data.draw(CELLS) for _ in columns] for _ in range(high)]
    require_whole(columns, rows, (), drawn(columns, rows, (), across), across)


@settings(max_examples=40)
@given(PROSE)
def test_prose_beside_numbers_loses_nothing(text: str) -> None:
    columns, row = ["status", "prompt", "number", "share"], ["recovered", text, "123456.789", "98.7 %"]
    for across in WIDTHS:
        lines = drawn(columns, [row], ["prompt"], across)
        require_whole(columns, [[row[0], "", *row[2:]]], ["prompt"], lines, across)
        shown = "".join(lines)
        assert all(shown.count(char) >= text.count(char) for char in set(text) if char.isalnum())


def test_columns_as_they_fit() -> None:
    columns, rows = ["layer", "margin", "radius"], [["1", "48.52", "0.00074"], ["30", "397.2", "0.037"]]
    assert drawn(columns, rows, (), 20) == [
        " layer ┃ margin",
        "━━━━━━━╇━━━━━━━━",
        " 1     │ 48.52",
        " 30    │ 397.2",
        " layer ┃ radius",
        "━━━━━━━╇━━━━━━━━━",
        " 1     │ 0.00074",
        " 30    │ 0.037",
    ]
    text = "a text that is longer than its line"
    assert drawn(["status", "prompt"], [["recovered", text]], ["prompt"], 24) == [
        " status │ recovered",
        " prompt │ a text that",
        "        │ is longer",
        "        │ than its line",
    ]


def test_prose_shares_what_is_left() -> None:
    text = "word " * 40
    lines = drawn(["first", "number", "second"], [[text, "1.5", text]], ["first", "second"], 100)
    widths = [len(part) for part in lines[1].split("╇")]
    assert sum(widths) + 2 == 100
    assert widths[0] - widths[2] in (-1, 0, 1)
    assert widths[1] == len(" number ")


def test_a_real_terminal() -> None:
    lines = STYLE.sub("", on_a_terminal(60, "lens", "list")).splitlines()
    assert max(map(len, lines)) == 60
    assert {line.split()[-1] for line in lines if line.split()[:2] == ["layer", "│"]} == {"15", "23", "final"}


@pytest.mark.parametrize("width", WIDTHS)
def test_stages_are_named_and_say_what_is_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now = [100.0]
    console = Console(width=width, height=30, force_terminal=True, file=io.StringIO(), color_system=None)
    bar = stage_bar(console)
    bar.get_time = lambda: now[0]
    stages = Stages(bar, terminal.printable)

    def line() -> str:
        with console.capture() as caught:
            console.print(bar.get_renderable())
        (one,) = caught.get().splitlines()
        assert cell_len(one) <= width
        return one

    stages.report(0, 1, "codebook")
    now[0] += 75
    assert "codebook" in line()
    assert "1:15" in line()
    assert "left" not in line()
    for done in range(1, 4):
        stages.report(done - 1, 1000, "layers carried on at 4 bits, of \x1b[31m many")
        now[0] += 10
        stages.report(done, 1000, "layers carried on at 4 bits, of \x1b[31m many")
    assert "\x1b" not in line()
    assert "layers" in line()
    assert "3/1000" in line()
    assert re.search(r"0:30, 2:4\d:\d\d left", line())  # its own clock, not that of the stage before
