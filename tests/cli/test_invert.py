"""``preimage invert``: from text, from bundles, and from bundles of somebody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import preimage
from support.bundles import MANIFEST, TENSORS
from support.commands import Typed, process
from support.folders import VOCABULARY
from support.tiny import build, random_ids


def test_invert_text(document: Any, run: Typed, model: str) -> None:
    given = ["--model", model, "--text", "the cat", "--text", "a dog", "--layer", 2]
    for method in ("sipit", "brute-force"):
        code, found = document("invert", *given, "--method", method)
        assert code == 0
        assert (found["schema"], found["command"]) == ("preimage/9", "invert")
        assert found["model"] == preimage.load(model).identity.to_dict()
        assert [result["text"] for result in found["results"]] == ["<s>the cat", "<s>a dog"]
        for index, result in enumerate(found["results"]):
            assert (result["index"], result["exact"], result["status"]) == (index, True, "recovered")
            assert (result["layer"], result["method"]) == (2, method)
            assert len(result["positions"]) == len(result["token_ids"])
            assert result["seconds"] > 0
            assert result["forward_tokens"] > 0
            assert result["margin"] > 0
    code, out, err = run("invert", *given)
    assert code == 0
    assert "<s>the cat" in out
    assert "recovered" in out
    assert err == ""  # no bar where stderr is no terminal


def test_invert_a_bundle(document: Any, model: str, bundle: Path) -> None:
    code, found = document("invert", bundle, "--layer", 1)  # its model is named in the bundle
    assert code == 0
    assert [result["text"] for result in found["results"]] == ["<s>the cat", "<s>a dog"]
    assert [result["exact"] for result in found["results"]] == [True, True]
    code, found = document("invert", bundle)
    assert code == 2
    assert found["error"] == {
        "code": "bad_layer", "message": "These states hold 2 layers.", "hint": "Choose one of 1, 2.",
    }  # fmt: skip


def test_what_is_not_recovered_is_exit_code_1(
    document: Any, run: Typed, folders: dict[str, Path], bundle: Path
) -> None:
    given = ["invert", bundle, "--model", folders["other"], "--any-model", "--layer", 1]
    given += ["--method", "brute-force"]
    code, found = document(*given)
    assert code == 1
    for result in found["results"]:
        assert (result["status"], result["exact"], result["token_ids"]) == ("not_recovered", False, [])
        assert result["failed_position"] == 0
        assert result["failed_distance"] > 0
    code, out, _ = run(*given)
    assert code == 1
    assert "No token of the vocabulary fits at position 0" in out
    code, found = document("invert", bundle, "--layer", 1, "--max-tests", 1, "--seed", 3)
    assert code == 1
    assert "the budget of 1 tests is spent" in found["results"][0]["reason"]


def test_a_proof_is_stored_and_drawn(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["invert", "--model", model, "--prompts", "random", "--count", 1, "--length", 4, "--layer", 1]
    given += ["--prove", "--out", tmp_path / "proof"]
    code, found = document(*given)
    assert code == 0
    (result,) = found["results"]
    assert [p["tolerated_noise"] for p in result["positions"]] == [
        p["margin"] / 2 for p in result["positions"]
    ]
    assert result["margin"] == min(p["margin"] for p in result["positions"])
    assert "Margins at layer 1" in (tmp_path / "proof" / "margins-0.html").read_text(encoding="utf-8")
    code, out, _ = run(*given)
    assert (code, "tolerated D/2" in out) == (0, True)
    code, found = document(*given[:-3], "--proposers", "tea-leaves")
    assert (code, found["error"]["code"]) == (2, "bad_option")


def test_a_bundle_is_inverted_by_a_process_that_sees_nothing_else(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    texts = ["the cat sat", "hunter2 is it"]
    for side in ("sender", "receiver"):
        (tmp_path / side).mkdir()
        shutil.copytree(folders["model"], tmp_path / side / "model")
    given = [argument for text in texts for argument in ("--text", text)]
    given += ["--model", "model", "--layers", "2", "--withhold-ids", "--out", "b"]
    sender = {"cwd": tmp_path / "sender", "PREIMAGE_CACHE": str(tmp_path / "sender" / "cache")}
    done = process(
        "capture", "--model", "model", *given, "--layers", 2, "--withhold-ids", "--out", "b", **sender
    )
    assert done.returncode == 0, done.stderr
    bundle = shutil.move(tmp_path / "sender" / "b", tmp_path / "receiver" / "b")
    shutil.rmtree(tmp_path / "sender")
    ids = [preimage.load(folders["model"]).tokenizer(text)["input_ids"] for text in texts]
    holds_no_ids(bundle, ids, texts)
    receiver = {"cwd": tmp_path / "receiver", "PREIMAGE_CACHE": str(tmp_path / "receiver" / "cache")}
    done = process("invert", "b", "--method", "brute-force", "--json", **receiver)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["status"] for result in results] == ["recovered", "recovered"]
    assert [result["token_ids"] for result in results] == ids
    assert [result["text"] for result in results] == [f"<s>{text}" for text in texts]
    assert [result["exact"] for result in results] == [None, None]  # nobody there knows the truth


def holds_no_ids(bundle: Path, ids: list[list[int]], texts: list[str]) -> None:
    assert sorted(path.name for path in bundle.iterdir()) == [MANIFEST, "record.jsonl", TENSORS]
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert manifest["token_ids"] is None
    raw = (bundle / TENSORS).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "__metadata__" not in header

    def lists_in(value: Any) -> Iterator[list[Any]]:
        if isinstance(value, list):
            yield value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from lists_in(item)

    for found in (*lists_in(manifest), *lists_in(header)):
        assert len(found) < min(map(len, ids))  # groups, layers, shapes: none is as long as a prompt
    everything = (bundle / MANIFEST).read_bytes() + (bundle / "record.jsonl").read_bytes() + raw
    for row, text in zip(ids, texts, strict=True):
        assert text.encode() not in everything
        for kind in ("<i4", "<i8", "<u2"):
            assert np.array(row, dtype=kind).tobytes() not in everything


def test_positions_of_an_object_in_memory_serve_the_command_line(
    document: Any, model: str, tmp_path: Path
) -> None:
    module = build("llama", vocab_size=VOCABULARY)
    ids = random_ids(6, vocabulary=VOCABULARY)
    preimage.capture(preimage.load(module), [ids], 3).save(tmp_path / "b")
    code, found = document("invert", tmp_path / "b", "--model", model)  # the same weights, from a folder
    assert code == 0
    assert found["results"][0]["token_ids"] == ids
    code, found = document("invert", tmp_path / "b")  # its name is no place
    assert code == 2
    assert "'LlamaForCausalLM' is not an alias" in found["error"]["message"]
