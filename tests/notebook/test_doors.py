"""Whatever people pass is taken for what it is, or refused in our own words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    surroundings = os.environ | {"HF_HUB_OFFLINE": "1"}
    tests = str(Path(__file__).parents[1])
    surroundings["PYTHONPATH"] = os.pathsep.join([tests, surroundings.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "support.doors"], capture_output=True, text=True, check=False, env=surroundings
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_what_is_no_model_no_prompt_and_no_state_is_refused_in_words(ends: dict[str, str]) -> None:
    refused = {name: end for name, end in ends.items() if name.endswith(" refused")}
    assert len(refused) > 170
    wrong = {name: end for name, end in refused.items() if not end.startswith("refused: ")}
    assert not wrong
    assert all(len(end) < 500 for end in refused.values())


def test_a_transformers_model_is_told_what_to_do_with_it(ends: dict[str, str]) -> None:
    told = "A LlamaForCausalLM is no model that preimage loaded. Use model = preimage.load(model) once"
    doors = [name for name in ends if name.endswith(" raw refused")]
    assert len(doors) == 16
    assert all(ends[name].startswith(f"refused: {told}") for name in doors)


def test_ids_and_states_are_taken_in_any_form(ends: dict[str, str]) -> None:
    taken = {name: end for name, end in ends.items() if not name.endswith(" refused")}
    assert len(taken) == 33
    for name, end in taken.items():
        assert end == ("[(7, 3, 9, 4)]" if name.startswith("invert") else "((7, 3, 9, 4),)"), name
