"""``preimage collisions`` and ``preimage continuations``: documents, figures, exit codes, continuing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import preimage
from support.commands import Typed
from support.folders import VOCABULARY, make_folder
from support.run_folders import lines_of


def test_collisions(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    texts, out = ["the cat", "a dog", "the cats sat", "the cat"], tmp_path / "run"
    given = ["collisions", "--model", model, *(part for text in texts for part in ("--text", text))]
    given += ["--layers", "0,2,final", "--hard-bases", 2, "--closest", 2, "--threshold", 0.5]
    code, found = document(*given, "--out", out)
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/9", "collisions")
    options = {"thresholds": (0.5,), "closest": 2, "hard_bases": 2}
    audit = preimage.find_collisions(preimage.load(model), texts, "0,2,final", **options)
    assert found["results"] == json.loads(json.dumps(audit.to_dict()))
    assert (found["results"]["prompts"], found["results"]["duplicates_removed"]) == (3, 1)
    assert [entry["layer"] for entry in found["results"]["layers"]] == [0, 2, "final"]
    for entry in found["results"]["layers"]:
        assert (entry["spacing"]["pairs"], entry["spacing"]["below"].keys()) == (3, {"1e-06", "0.5"})
    assert found["results"]["unexplained"] == 0
    names = ["items.jsonl", "layers.parquet", "record.jsonl", "run.json", "spacing.html"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert "all pairs of 3 prompts" in (out / "spacing.html").read_text(encoding="utf-8")
    assert json.loads((out / "run.json").read_text())["results"] == found["results"]
    before = lines_of(out)
    assert document(*given, "--out", out) == (code, found)
    assert lines_of(out) == before
    code, text, err = run(*given)
    assert (code, err) == (0, "")
    assert "3 prompts of " in text
    assert "3 pairs a layer" in text
    assert "Hard pairs at layer final" in text
    assert "closest at layer final: '<s>" in text
    assert "UNEXPLAINED" not in text
    code, text, _ = run(*given, "--layers", "0", "--text", "the dogs sat")
    assert code == 0
    assert re.search(r"^layer 0, within noise: \d same last token at layer 0$", text, re.MULTILINE)


def test_collisions_at_several_lengths(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["collisions", "--model", model, "--prompts", "random", "--count", 6, "--lengths", "4,8"]
    given += ["--layers", "1,final", "--hard-bases", 0, "--seed", 3]
    code, found = document(*given, "--out", tmp_path / "sweep")
    assert code == 0
    assert found["results"].keys() == {"4", "8"}
    assert [audit["lengths"] for audit in found["results"].values()] == [[4, 4], [8, 8]]
    one = ["--length", 8, "--count", 6, "--prompts", "random", "--layers", "1,final", "--hard-bases", 0]
    code, alone = document("collisions", "--model", model, *one, "--seed", 3)
    assert (code, alone["results"]) == (0, found["results"]["8"])
    for length in (4, 8):
        folder = tmp_path / "sweep" / f"length-{length}"
        assert {"run.json", "layers.parquet", "spacing.html"} <= {path.name for path in folder.iterdir()}
    code, text, _ = run(*given)
    assert code == 0
    assert "6 prompts of 4 tokens" in text
    assert "6 prompts of 8 tokens" in text


def test_prompts_with_the_same_next_token_are_compared(document: Any, model: str) -> None:
    given = ["--prompts", "same-next:arithmetic", "--count", 5, "--layers", 2, "--hard-bases", 0]
    code, found = document("collisions", "--model", model, *given)
    assert code == 0
    (layer,) = found["results"]["layers"]
    assert (layer["spacing"]["pairs"], layer["hard"]) == (10, [])
    assert layer["spacing"]["closest"][0]["first_text"].endswith(" =")


def test_continuations(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["continuations", "--model", model, "--text", "the cat", "--text", "a", "--layer", 2]
    code, found = document(*given, "--out", tmp_path / "scan")
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/9", "continuations")
    scan = preimage.scan_continuations(preimage.load(model), ["the cat", "a"], 2, hard_bases=0)
    assert found["results"] == json.loads(json.dumps(scan.to_dict()))
    assert [prefix["text"] for prefix in found["results"]["prefixes"]] == ["<s>the cat", "<s>a"]
    for prefix in found["results"]["prefixes"]:
        assert prefix["spacing"]["states"] == VOCABULARY
        assert prefix["margin"] == prefix["spacing"]["closest"][0]["distance"] > 0
    names = ["items.jsonl", "prefixes.parquet", "record.jsonl", "run.json"]
    assert sorted(path.name for path in (tmp_path / "scan").iterdir()) == names
    code, text, err = run(*given)
    assert (code, err) == (0, "")
    assert f"Every next token at layer 2, {VOCABULARY * (VOCABULARY - 1) // 2} pairs a prefix" in text
    assert "0: …<s>the cat" in text
    assert "1, closest tokens: " in text


def test_the_closest_prompts_of_a_search_are_continued(
    document: Any, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched = ["collisions", "--model", model, "--prompts", "random", "--count", 12, "--length", 5]
    searched += ["--layers", "1,final", "--hard-bases", 0, "--out", tmp_path / "run"]
    code, audit = document(*searched)
    assert code == 0
    pair = audit["results"]["layers"][-1]["spacing"]["closest"][0]
    given = ["continuations", "--model", model, "--audit", tmp_path / "run"]
    code, found = document(*given, "--count", 2)
    assert code == 0
    assert found["results"]["layer"] == "final"
    prefixes = [prefix["prefix"] for prefix in found["results"]["prefixes"]]
    assert prefixes == [pair["first_ids"], pair["second_ids"]]
    code, found = document(*given)
    assert (code, len(found["results"]["prefixes"])) == (0, 10)
    for count in (0, -1):
        code, found = document(*given, f"--count={count}")
        assert (code, found["error"]["message"]) == (2, f"count is {count}.")
    code, found = document(*given, "--text", "x")
    assert (code, found["error"]["hint"]) == (2, "Give one of --text, --audit and --prompts.")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"state": "done"', '"state": "running"'))
    code, found = document(*given)
    assert (code, found["error"]["code"]) == (2, "bad_run_folder")
    assert found["error"]["message"] == f"{tmp_path / 'run'} holds no finished collision search."


def test_a_search_of_one_family_has_nothing_to_continue(
    document: Any, run: Typed, model: str, jsonl: Callable[..., str], tmp_path: Path
) -> None:
    given = ["collisions", "--model", model, "--prompts", jsonl([7, 7], [7, 7, 7]), "--layers", 1]
    given += ["--hard-bases", 0, "--out", tmp_path / "run"]
    code, found = document(*given)
    assert (code, found["results"]["layers"][0]["spacing"]["margin"]) == (0, None)
    assert run(*given)[0] == 0
    code, found = document("continuations", "--model", model, "--audit", tmp_path / "run")
    assert (code, found["error"]["message"]) == (2, "No prompt was given.")


def test_an_unexplained_collision_is_exit_code_1(
    document: Any, run: Typed, own_cache: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "flat")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 0  # every state at "final" is 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    given = ["--model", folder, "--text", "the cat", "--text", "a dog"]
    code, found = document("collisions", *given, "--layers", "2,final", "--hard-bases", 0)
    assert code == 1
    assert [layer["spacing"]["unexplained"] for layer in found["results"]["layers"]] == [0, 1]
    assert found["results"]["unexplained"] == 1
    assert found["results"]["layers"][1]["spacing"]["listed"][0]["explanation"] == "unexplained"
    code, text, _ = run("collisions", *given, "--layers", "2,final", "--hard-bases", 0)
    assert code == 1
    assert "UNEXPLAINED at layer final: '<s>the cat' and '<s>a dog', 0 apart" in text
    assert run("collisions", *given, "--layers", "2", "--hard-bases", 0)[0] == 0
    code, found = document("collisions", *given, "--layers", "final", "--hard-bases", 1)
    assert code == 1
    assert found["results"]["unexplained"] > 1  # hard pairs count too
    code, found = document("continuations", *given[:4], "--closest", 1)
    assert code == 1
    assert found["results"]["unexplained"] == VOCABULARY * (VOCABULARY - 1) // 2
    assert found["results"]["prefixes"][0]["margin"] == 0
    code, text, _ = run("continuations", *given[:4], "--closest", 1)
    assert (code, "0, UNEXPLAINED: " in text) == (1, True)


def test_an_interrupted_search_is_continued_by_the_same_command(
    document: Any, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # C2
    given = ["collisions", "--model", model, "--prompts", "random", "--count", 8, "--length", 5]
    given += ["--hard-bases", 1, "--out", tmp_path / "run"]

    @contextmanager
    def interrupted() -> Iterator[Callable[[int, int, str], None]]:
        def report(done: int, total: int, note: str) -> None:
            if note.startswith("layers compared") and done == 2:
                raise KeyboardInterrupt

        yield report

    with monkeypatch.context() as patch:
        patch.setattr("preimage.cli.collisions.progress_bar", interrupted)
        code, found = document(*given)
    assert (code, found["error"]["code"]) == (130, "interrupted")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "running"
    kept = lines_of(tmp_path / "run")
    assert len(kept) == 2
    code, found = document(*given)
    assert code == 0, found
    assert lines_of(tmp_path / "run")[:2] == kept
    assert document(*given[:-2]) == (0, found)
    assert not (tmp_path / "run" / "states").exists()
