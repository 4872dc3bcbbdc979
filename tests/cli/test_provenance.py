"""Where prompts came from is said by everything that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preimage
from support.commands import interrupted


def test_results_say_where_their_prompts_came_from(document: Any, model: str, tmp_path: Path) -> None:
    given = ["--model", model, "--prompts", "random", "--count", 9, "--length", 4, "--seed", 5]
    bundle = tmp_path / "bundle"
    code, _ = document("capture", *given, "--layers", 2, "--out", bundle)
    assert code == 0
    expected = preimage.gather(
        "random", preimage.load(model), preimage.PromptOptions(count=9, length=4, seed=5)
    ).provenance
    assert (expected["source"], expected["seed"], expected["count"]) == ("random", 5, 9)
    assert json.loads((bundle / "manifest.json").read_text())["prompts"] == expected
    assert preimage.open_states(bundle).prompts == expected
    code, inverted = document("invert", bundle, "--model", model, "--layer", 2)
    assert (code, inverted["prompts"]) == (0, expected)
    code, measured = document("geometry", bundle)
    assert (code, measured["source"]) == (0, "random")
    code, audit = document("collisions", *given, "--layers", 2)
    assert (code, audit["results"]["source"]) == (0, "random")
    assert audit["results"]["fingerprint"] == expected["fingerprint"]


def test_withheld_ids_withhold_their_source_too(document: Any, model: str, tmp_path: Path) -> None:
    given = ["--model", model, "--prompts", "random", "--count", 3, "--length", 4]
    code, _ = document("capture", *given, "--layers", 2, "--withhold-ids", "--out", tmp_path / "b")
    assert code == 0
    assert preimage.open_states(tmp_path / "b").prompts is None
    assert json.loads((tmp_path / "b" / "record.jsonl").read_text())["command"] is None


def test_a_withheld_text_is_nowhere_even_where_the_capture_is_killed(model: str, tmp_path: Path) -> None:
    out, secret = tmp_path / "b", "hunter2hunter2"
    given = ["capture", "--model", model, "--text", secret, "--layers", 2, "--withhold-ids", "--out", out]
    code, _, _ = interrupted("preimage.storage", "Run", "keep", 1, *given)
    assert code == 130
    files = [path for path in out.rglob("*") if path.is_file()]
    assert out / "capture" / "record.jsonl" in files
    assert not [path for path in files if secret.encode() in path.read_bytes()]
