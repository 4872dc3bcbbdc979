"""No table in docs/results is typed: every one that a script makes is what the raw json says."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RESULTS))
    return importlib.import_module("build")


def test_pages_are_what_their_raw_files_say() -> None:
    done = subprocess.run(
        [sys.executable, RESULTS / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Changed: nothing\n"), done.stderr


def test_tables_go_to_their_places(build: Any) -> None:
    page = "words\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\nmore\n\n| a | b |\n| - | - |\n| 3 | 4 |\nend\n"
    made = ["| a | b |\n| --- | --- |\n| 5 | 6 |", "| a | b |\n| --- | --- |\n| 7 | 8 |"]
    new = build.rebuilt(page, made)
    assert build.tables(new) == made
    assert [line for line in new.splitlines() if line and line[0] != "|"] == ["words", "more", "end"]
    with pytest.raises(SystemExit, match="No place"):
        build.rebuilt("| a | c |\n", made)
