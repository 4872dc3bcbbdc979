"""A collision search stopped at any moment continues to the same bytes (J1, J2)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

import preimage
from preimage.errors import RunFolderError
from preimage.storage import Run
from support.collisions import GIVEN, PROMPTS, Stopped, lines, results_of, search, stop_at
from support.refusing import refused
from support.tiny import build, tiny


def differing(first: Any, second: Any, at: str = "") -> list[str]:
    """Where two documents differ, and how: what an assertion over two files of bytes does not show."""
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [line for key in first for line in differing(first[key], second[key], f"{at}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for i, pair in pairs for line in differing(*pair, f"{at}[{i}]")]
    return [] if first == second else [f"{at}: {first!r}, {second!r}"]


def test_a_run_folder_holds_what_the_search_returns(whole: Path, compared: list[int]) -> None:
    assert sorted(path.name for path in whole.iterdir()) == [
        "items.jsonl",
        "layers.parquet",
        "record.jsonl",
        "run.json",
    ]
    saved = json.loads((whole / "run.json").read_text())
    assert (saved["schema"], saved["command"], saved["state"]) == ("preimage/9", "collisions", "done")
    audit = preimage.find_collisions(tiny("llama"), PROMPTS, **GIVEN)
    assert len(compared) == 5
    assert saved["results"] == json.loads(json.dumps(audit.to_dict()))
    assert parquet.read_table(whole / "layers.parquet").to_pylist() == audit.rows()
    before = results_of(whole)
    assert search(whole) == audit  # a finished run is read, not run
    assert len(compared) == 5
    assert results_of(whole) == before


@pytest.mark.parametrize(
    ("note", "number", "left"),
    [("prompts captured", 2, 5), ("layers compared", 2, 4), ("layers compared", 4, 2), ("layers", 6, 0)],
)
def test_an_interrupted_search_continues(
    note: str, number: int, left: int, whole: Path, compared: list[int], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        search(out, progress=stop_at(note, number))
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    assert (out / "states").is_dir()
    assert not (out / "layers.parquet").exists()
    kept = (out / "items.jsonl").read_bytes() if left < 5 else b""
    assert lines(out) == 5 - left
    compared.clear()
    reports: list[tuple[int, int]] = []
    search(out, progress=lambda done, total, said: reports.append((done, total)))
    assert len(compared) == left  # finished layers are not compared again
    assert reports[-left:] == [(done, 5) for done in range(6 - left, 6)] or left == 0
    assert (out / "items.jsonl").read_bytes().startswith(kept)
    assert results_of(out) == results_of(whole)
    assert not (out / "states").exists()


def test_a_search_stopped_at_any_moment_gives_the_same_bytes(
    whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What a kill -9 leaves is what is on the disk at that moment: a copy of the folder.
    out, copies = tmp_path / "run", []

    def copy_folder(*_: object) -> None:
        if out.exists():
            copies.append(shutil.copytree(out, tmp_path / f"killed-{len(copies)}"))

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            copy_folder()
            found = original(*args, **kwargs)
            copy_folder()
            return found

        return call

    with monkeypatch.context() as patch:
        for home, name in ((Run, "finish"), (shutil, "rmtree")):
            patch.setattr(home, name, watched(getattr(home, name)))
        search(out, progress=copy_folder)
    last = next(folder for folder in reversed(copies) if (folder / "states").exists())
    running = next(folder for folder in copies if lines(folder) == 3)
    torn, lost, half = (tmp_path / name for name in ("torn", "lost", "half"))
    shutil.copytree(running, torn)
    (torn / "items.jsonl").write_bytes((running / "items.jsonl").read_bytes()[:-40])  # half a line
    shutil.rmtree(shutil.copytree(running, lost) / "states")  # captured again
    shutil.rmtree(shutil.copytree(last, half) / "states" / "prompts")  # killed while cleaning up
    unfinished = 0
    for folder in (*copies, torn, lost, half):
        unfinished += (folder / "states").exists()
        search(folder)
        assert results_of(folder) == results_of(whole), folder.name
    assert unfinished > 15


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.collisions import search
def kill(done, total, note):
    if note.startswith("layers compared") and done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
search(Path(sys.argv[2]), progress=kill)
"""


def test_a_killed_process_is_continued_by_another(whole: Path, compared: list[int], tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), str(out)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # the bits of a state depend on them
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert lines(out) == 3
    search(out)
    assert len(compared) == 2
    assert not differing(*(json.loads((folder / "run.json").read_text()) for folder in (out, whole)))
    assert results_of(out) == results_of(whole)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": lambda: tiny("llama", seed=1)}),
        ("model", {"model": lambda: preimage.load(build("llama", dtype=torch.bfloat16))}),
        ("prompts", {"prompts": lambda: PROMPTS[:-1]}),
        ("prompts", {"prompts": lambda: PROMPTS[::-1]}),
        ("layers", {"layers": lambda: "0-3"}),
        ("options", {"closest": lambda: 5}),
        ("options", {"thresholds": lambda: (0.25,)}),
        ("options", {"hard_bases": lambda: 1}),
        ("options", {"seed": lambda: 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_other_work_in_the_folder_is_refused_by_the_field(
    field: str, change: dict[str, Callable[[], Any]], whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    error = refused(RunFolderError, lambda: search(out, **{name: make() for name, make in change.items()}))
    assert f"{out} was begun with another {field}: " in error.message
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_duplicates_and_order_of_layers_are_no_other_work(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    audit = search(out, prompts=[*PROMPTS, PROMPTS[3]], layers=["final", 3, 2, 1, 0, 0])
    assert audit.duplicates_removed == 1
    assert audit.layers == search(whole).layers
