"""Run folders: half lines, locks, damage, other versions and full disks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from preimage.errors import RunFolderError
from preimage.storage import Run, dumps
from preimage.theory import Verdict
from support.run_folders import lines_of


def test_half_a_line_is_dropped_and_done_again(tmp_path: Path) -> None:
    plan = {"command": "invert", "layer": 3}
    folder = Run(plan, tmp_path / "r")
    folder.keep("0", {"text": "a\u2028b\ud800", "value": float("nan")})
    folder.keep("1", {"value": 2})
    whole = lines_of(tmp_path / "r")
    with (tmp_path / "r" / "items.jsonl").open("ab") as file:
        file.write(b'{"key": "2", "item": {"val')  # killed here
    again = Run(plan, tmp_path / "r")
    assert again.items == {"0": {"text": "a\u2028b\ud800", "value": None}, "1": {"value": 2}}
    assert lines_of(tmp_path / "r") == whole
    again.keep("2", {"value": 3})
    assert Run(plan, tmp_path / "r").items["2"] == {"value": 3}


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:  # J3
    code = (
        "import sys, time; from preimage.storage import Run; "
        "kept = Run({'layer': 3}, sys.argv[1]); print('in', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "r")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            before = (tmp_path / "r" / "run.json").read_bytes()
            for plan in ({"layer": 3}, {"layer": 4}):
                with pytest.raises(RunFolderError, match="Another process"):
                    Run(plan, tmp_path / "r")
            assert (tmp_path / "r" / "run.json").read_bytes() == before
        finally:
            other.kill()
    first = Run({"layer": 3}, tmp_path / "r")  # the lock went with the process
    again = Run({"layer": 3}, tmp_path / "r")  # and does not keep out its own
    first.keep("1", {})
    assert set(Run({"layer": 3}, tmp_path / "r").items) == {"1"}
    del first, again


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("run.json", b"{"), ("run.json", b"[]"), ("run.json", b"\xff"), ("run.json", b""),
        ("items.jsonl", b"{\n"), ("items.jsonl", b"[]\n"), ("items.jsonl", b"{}\n"), ("items.jsonl", b"3\n"),
        ("items.jsonl", b"\xff\n"),
    ],
)  # fmt: skip
def test_a_damaged_run_folder_is_refused_by_the_file(name: str, raw: bytes, tmp_path: Path) -> None:
    Run({"layer": 3}, tmp_path / "r")
    (tmp_path / "r" / name).write_bytes(raw)
    with pytest.raises(RunFolderError, match=re.escape(str(tmp_path / "r" / name))) as caught:
        Run({"layer": 3}, tmp_path / "r")
    assert caught.value.hint == "Give another folder."


@pytest.mark.parametrize("item", [{}, {"id": 3}, {"id": "a"}, [], 7, None])
def test_a_damaged_item_is_refused_by_the_file(item: object, tmp_path: Path) -> None:
    Run({"layer": 3}, tmp_path / "r").keep("1", {"id": "a"})
    (tmp_path / "r" / "items.jsonl").write_text(json.dumps({"key": "1", "item": item}) + "\n")
    with pytest.raises(RunFolderError, match=r"items\.jsonl is damaged") as caught:
        Run({"layer": 3}, tmp_path / "r").kept(["1"], Verdict)
    assert "\n" not in str(caught.value)


def test_a_schema_of_another_version_is_refused(tmp_path: Path) -> None:
    Run({"layer": 3}, tmp_path / "r")
    path = tmp_path / "r" / "run.json"
    path.write_text(path.read_text().replace("preimage/9", "preimage/0"))
    with pytest.raises(RunFolderError, match='begun with another schema: "preimage/0", now "preimage/9"'):
        Run({"layer": 3}, tmp_path / "r")


def test_a_run_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        Run({}, tmp_path / "file" / "r")
    folder = Run({}, tmp_path / "r")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"items\.jsonl cannot be written: No space left on device"):
        folder.keep("0", {})
    with pytest.raises(
        RunFolderError, match=r"(run\.json|items\.jsonl) cannot be written: No space left on device"
    ):
        folder.finish(dict)
    monkeypatch.undo()
    assert json.loads((tmp_path / "r" / "run.json").read_text())["state"] == "running"
    assert not list((tmp_path / "r").glob("*.partial"))


def test_documents_hold_only_what_json_knows() -> None:
    text = dumps({"a": float("nan"), "b": (1, float("inf")), 3: "\ud800\x1b\u2028"})
    assert text.isascii()
    assert json.loads(text) == {"a": None, "b": [1, None], "3": "\ud800\x1b\u2028"}
