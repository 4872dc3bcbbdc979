"""Where prompts came from is said by everything that is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preimage


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
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["manifest.json", "states.safetensors"]
