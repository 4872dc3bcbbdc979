"""Run folders of commands: finished work is not redone, other work is refused, Ctrl-C continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import preimage
from support.bundles import MANIFEST, TENSORS
from support.commands import LAYERS, WIDTH, Typed, interrupted
from support.run_folders import lines_of


def test_a_finished_run_is_not_run_again(document: Any, model: str, tmp_path: Path) -> None:
    given = ["invert", "--model", model, "--text", "the cat", "--layer", 1, "--out", tmp_path / "r"]
    code, first = document(*given)
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "items.jsonl",
        "record.jsonl",
        "run.json",
    ]
    saved = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (saved["schema"], saved["command"], saved["state"]) == ("preimage/9", "invert", "done")
    assert saved["model"] == first["model"]
    results = [{k: v for k, v in r.items() if k not in ("index", "exact")} for r in first["results"]]
    assert saved["results"] == results
    before = lines_of(tmp_path / "r")
    code, second = document(*given)
    assert code == 0
    assert second == first  # the seconds too: nothing was measured anew
    assert lines_of(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--method", "brute-force"], 'options: method "fast", now "brute-force".'),
        (["--seed", 1], "options: seed 0, now 1."),
        (["--text", "another cat"], "states: "),
        (["--layer", 2], "layer: 1, now 2."),
        (["--dtype", "float64"], 'model: dtype "float32", now "float64".'),
        (["--model", "other"], "model: name "),
    ],
    ids=str,
)
def test_a_run_folder_of_other_work_is_refused_by_the_field(
    changed: list[object], said: str, run: Typed, model: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "r"
    first = ["invert", "--model", model, "--text", "the cat", "--layer", 1, "--out", out]
    assert run(*first)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    changed = [str(folders["other"]) if argument == "other" else argument for argument in changed]
    code, stdout, stderr = run(*first, *changed)
    assert (code, stdout) == (2, "")
    assert f"{out} was begun with another {said}" in stderr
    assert "Rerun the first command, or give another folder." in stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("kind", ["a bundle", "a file", "other files"])
def test_a_folder_that_is_no_run_folder_is_refused(
    kind: str, run: Typed, model: str, bundle: Path, tmp_path: Path
) -> None:
    out = {"a bundle": bundle, "a file": tmp_path / "f", "other files": tmp_path / "d"}[kind]
    (tmp_path / "f").write_text("mine")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code, _, stderr = run("invert", "--model", model, "--text", "the cat", "--layer", 1, "--out", out)
    assert code == 2
    assert f"{out} exists and is not a run folder." in stderr
    assert sorted(tmp_path.rglob("*")) == before


# --- Ctrl-C -----------------------------------------------------------------------------------


def test_ctrl_c_leaves_a_run_that_continues(document: Any, model: str, tmp_path: Path) -> None:  # C2
    out, count = tmp_path / "r", 4
    given = ["invert", "--model", model, "--prompts", "random", "--count", count, "--length", 4]
    given += ["--layer", 3, "--method", "brute-force"]
    code, stdout, stderr = interrupted("preimage.storage", "Run", "keep", 3, *given, "--out", out, "--json")
    assert code == 130
    assert json.loads(stdout)["error"]["code"] == "interrupted"
    assert "Traceback" not in stderr
    kept = lines_of(out)
    assert len(kept) == 2  # the first call was the capture's
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    code, continued = document(*given, "--out", out)
    assert code == 0
    assert lines_of(out)[: len(kept)] == kept  # the seconds in them too: finished prompts were not redone
    assert len(lines_of(out)) == count
    code, whole = document(*given)
    assert code == 0
    for result, expected in zip(continued["results"], whole["results"], strict=True):
        measured = {name: expected[name] for name in ("seconds", "setup_seconds")}
        assert result | measured == expected
    for index, line in enumerate(kept):
        assert json.loads(line)["item"]["seconds"] == continued["results"][index]["seconds"]
    assert json.loads((out / "run.json").read_text())["state"] == "done"


def test_ctrl_c_leaves_a_capture_that_continues(document: Any, model: str, tmp_path: Path) -> None:  # C2
    out, count = tmp_path / "b", 40
    given = ["capture", "--model", model, "--prompts", "random", "--count", count, "--length", 64]
    given += ["--layers", "all"]
    partial, writes = out / f"{TENSORS}.partial", 17 * (LAYERS + 2)  # one a prompt and layer
    code, stdout, stderr = interrupted(
        "preimage.storage.tensor_file", "TensorFileWriter", "write", writes, *given, "--out", out
    )
    assert code == 130
    assert stdout == ""
    assert stderr.startswith("preimage: Interrupted.")
    assert not (out / MANIFEST).exists()
    done = int(json.loads(lines_of(out / "capture")[-1])["key"].split("-")[1])
    assert done == 16  # in the midst of the 17th
    before = partial.read_bytes()
    code, found = document(*given, "--out", out)
    assert code == 0
    assert found["prompts"] == count
    states, checked = preimage.open_states(out), range(max(0, done - 3), min(count, done + 3))
    expected = preimage.capture(preimage.load(model), [states.token_ids[i] for i in checked], "all")
    for index, prompt in enumerate(checked):  # where the two halves meet
        assert torch.equal(states.at(prompt, LAYERS), expected.at(index, LAYERS))
    row = 64 * WIDTH * 4
    kept = (out / TENSORS).read_bytes()
    start = len(kept) - row * count * (LAYERS + 2)
    assert kept[start : start + done * row] == before[start : start + done * row]
