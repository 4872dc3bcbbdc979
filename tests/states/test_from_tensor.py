"""``States.from_tensor``: one tensor, or one a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import preimage
from preimage.errors import StatesError
from preimage.observations import Observation
from preimage.states import States
from support.bundles import same_numbers
from support.refusing import refused
from support.tiny import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_tensor_becomes_states_with_or_without_a_batch_axis(dtype: torch.dtype, tmp_path: Path) -> None:
    batch = torch.randn(3, 5, 32, dtype=dtype)
    states = States.from_tensor(batch, 2)
    assert (len(states), states.lengths, states.layers, states.d_model) == (3, (5, 5, 5), (2,), 32)
    assert states.token_ids is None
    assert states.model is None
    assert states.noise_floor == {}
    assert torch.equal(states.at(1, 2), batch[1])
    assert torch.equal(states.last(2), batch[:, -1])
    same_numbers(preimage.open_states(states.save(tmp_path / "b")), states)
    single = States.from_tensor(batch[1].T.contiguous().T, "final", tiny("llama"))  # strides do not matter
    assert (len(single), single.lengths, single.layers) == (1, (5,), ("final",))
    assert torch.equal(single.at(0, "final"), batch[1])
    assert single.model == tiny("llama").identity.to_dict()
    same_numbers(preimage.open_states(single.save(tmp_path / "c")), single)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(()),
        torch.zeros(1, 2, 3, 4),
        torch.zeros(0, 4),
        torch.zeros(4, 0),
        torch.zeros(2, 0, 4),
        torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.bool),
        torch.zeros(3, 4, dtype=torch.complex64),
        torch.zeros(3, 4).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_tensors_that_hold_no_states_are_refused(tensor: torch.Tensor) -> None:
    error = refused(StatesError, lambda: States.from_tensor(tensor, 1))
    assert f"shape {tuple(tensor.shape)} and type {tensor.dtype} holds no states" in error.message
    assert "positions x d_model" in error.hint


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_named_by_prompt_layer_and_position(bad: float) -> None:
    tensor = torch.randn(3, 5, 8)
    tensor[1, 4, 7] = bad
    error = refused(StatesError, lambda: States.from_tensor(tensor, "final"))
    assert error.message == "Prompt 1, layer final, position 4 holds NaN or infinity."
    error = refused(StatesError, lambda: States.from_tensor(tensor[1], 3))
    assert error.message == "Prompt 0, layer 3, position 4 holds NaN or infinity."


def test_a_tensor_of_another_width_is_refused() -> None:
    error = refused(StatesError, lambda: States.from_tensor(torch.randn(3, 31), 1, tiny("llama")))
    assert "31 wide, those of LlamaForCausalLM are 32" in error.message


def test_prompts_of_several_lengths(tmp_path: Path) -> None:
    prompts = [torch.randn(length, 8) for length in (5, 2, 5, 1)]
    states = States.from_tensor(prompts, 2)
    assert states.lengths == (5, 2, 5, 1)
    for index, prompt in enumerate(prompts):
        assert torch.equal(states.at(index, 2), prompt)
    same_numbers(preimage.open_states(states.save(tmp_path / "b")), states)
    prompts[2] = prompts[2][None]
    refused(StatesError, lambda: States.from_tensor(prompts, 2))


@pytest.mark.parametrize("kept", ["last", "mean"])
def test_one_vector_a_prompt_has_no_length(kept: str, tmp_path: Path) -> None:
    states = States.from_tensor(torch.randn(3, 1, 8), 2, observation=Observation(positions=kept))
    assert (states.positions, states.lengths, states.observation.positions) == (kept, (0, 0, 0), kept)
    opened = preimage.open_states(states.save(tmp_path / "b"))
    assert (opened.positions, opened.lengths, opened.observation.positions) == (kept, (0, 0, 0), kept)
    same_numbers(opened, states)
    long = torch.randn(3, 2, 8)
    refused(StatesError, lambda: States.from_tensor(long, 2, observation=Observation(positions=kept)))
    bad = torch.full((1, 1, 8), float("nan"))
    error = refused(StatesError, lambda: States.from_tensor(bad, 2, observation=Observation(positions=kept)))
    assert error.message == "Prompt 0, layer 2 holds NaN or infinity."


def test_a_capture_of_last_positions_says_so() -> None:
    states = preimage.capture(tiny("llama"), [[3, 4, 5]], 1, positions="last")
    assert (states.observation, states.lengths) == (Observation(positions="last"), (3,))
    assert preimage.capture(tiny("llama"), [[3, 4, 5]], 1).observation == Observation()
