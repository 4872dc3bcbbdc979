"""States by subscripts: a prompt, a prompt at a layer, one prompt after another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import preimage
from preimage.errors import LayerError, StatesError
from support.refusing import refused
from support.tiny import random_ids, tiny


@pytest.fixture(params=["memory", "disk"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> preimage.States:
    prompts = [random_ids(length, length) for length in (5, 3, 5)]
    out = tmp_path / "bundle" if request.param == "disk" else None
    return preimage.capture(tiny("llama"), prompts, layers=[1, "final"], out=out)


def test_a_prompt_is_its_states_by_layer(states: preimage.States) -> None:
    assert len(states) == 3
    for index, prompt in enumerate(states):
        assert list(prompt) == [1, "final"]
        for layer in states.layers:
            assert torch.equal(prompt[layer], states.at(index, layer))
            assert torch.equal(states[index, layer], states.at(index, layer))
    assert states[1, 1].shape == (3, 32)
    assert torch.equal(states[-1, "final"], states.at(2, "final"))
    assert torch.equal(states[np.int64(0)][1], states[0, 1])


@pytest.mark.parametrize(
    "key", [slice(2), "final", 1.0, True, None, (0, 1, 2), (slice(None), 1), ()], ids=repr
)
def test_what_is_no_subscript_is_refused(states: preimage.States, key: Any) -> None:
    error = refused(StatesError, lambda: states[key])
    assert "states.last(15)" in error.hint


def test_prompts_and_layers_that_are_not_there(states: preimage.States) -> None:
    for prompt in (3, -4):
        assert "There is no prompt" in refused(StatesError, lambda: states[prompt]).message  # noqa: B023
    assert refused(LayerError, lambda: states[0, 2]).message == "Layer 2 was not captured."
