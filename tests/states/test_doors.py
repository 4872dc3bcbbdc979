"""Whatever people have becomes the states that ``capture`` takes, or is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import preimage
from preimage import Observation, States, states_from
from preimage.errors import LayerError, OptionError, StatesError
from support.bundles import same_numbers
from support.refusing import refused
from support.tiny import NAMES, random_ids, tiny

L, WIDTH = 3, 32
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((6, 3, 9, 6, 1))]
EQUAL = [random_ids(6, seed) for seed in range(3)]


def captured(name: str, prompts: list[list[int]], layer: int | str) -> States:
    """The states of :func:`capture`, taken by plain passes: it measures noise too, which takes its time."""
    layer = layer if layer == "final" else int(layer)
    states = [tiny(name).states(torch.tensor([ids]), [layer])[layer][0] for ids in prompts]
    return States.from_tensor(states, layer)


def test_plain_passes_are_captures() -> None:
    same_numbers(captured("llama", PROMPTS, 2), preimage.capture(tiny("llama"), PROMPTS, 2))


def close(one: States, other: States) -> None:
    """The same but for what a batch changes in the last bits."""
    assert one.lengths == other.lengths
    assert one.layers == other.layers
    for prompt in range(len(one)):
        torch.testing.assert_close(one.at(prompt, one.layers[0]), other.at(prompt, one.layers[0]))


def test_tensors_and_arrays_of_one_prompt_and_of_several() -> None:
    model, truth = tiny("llama"), captured("llama", EQUAL, 2)
    batch = torch.stack([truth.at(index, 2) for index in range(3)])
    for x in (batch, batch.numpy(), batch.clone().requires_grad_(), list(batch), tuple(batch.numpy())):
        states = states_from(x, model, 2)
        same_numbers(states, truth)
        assert (states.lengths, states.observation) == ((6, 6, 6), Observation())
        assert (states.model, states.token_ids) == (None, None)  # nothing is claimed
    same_numbers(states_from(batch[0], model, 2), captured("llama", EQUAL[:1], 2))
    same_numbers(states_from(batch[0].numpy(), model, "2"), captured("llama", EQUAL[:1], 2))
    frozen = batch.numpy()[:, ::-1]
    frozen.flags.writeable = False
    assert torch.equal(states_from(frozen, model, 2).at(0, 2), batch[0].flip(0))
    assert torch.equal(states_from(batch.numpy().astype(">f4"), model, 2).at(1, 2), batch[1])


def test_ragged_prompts_keep_their_order() -> None:
    model, truth = tiny("llama"), captured("llama", PROMPTS, 2)
    ragged = [truth.at(index, 2) for index in range(len(PROMPTS))]
    for x in (ragged, tuple(ragged), [one.numpy() for one in ragged]):
        states = states_from(x, model, 2)
        assert states.lengths == truth.lengths
        same_numbers(states, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_type_of_the_numbers_is_kept(dtype: torch.dtype) -> None:
    tensor = torch.randn(4, WIDTH, dtype=dtype)
    states = states_from(tensor, tiny("llama"), 1)
    assert states.dtype == dtype
    assert torch.equal(states.at(0, 1), tensor)


@pytest.mark.parametrize("kept", ["last", "mean"])
def test_one_vector_a_prompt_only_where_it_is_said(kept: str) -> None:
    model, rows = tiny("llama"), torch.randn(4, WIDTH)
    for x in (rows, rows.numpy(), rows[:, None], list(rows)):
        states = states_from(x, model, 2, positions=kept)
        assert (len(states), states.positions, states.lengths) == (4, kept, (0, 0, 0, 0))
        assert torch.equal(states.last(2), rows)
        assert states.observation == Observation(positions=kept)
    assert len(states_from(rows[0], model, 2, observe=Observation(positions=kept))) == 1
    assert states_from(rows, model, 2).lengths == (4,)  # never guessed: positions of one prompt
    error = refused(StatesError, lambda: states_from(rows[0], model, 2))
    assert 'the "last" position or the "mean"' in error.hint
    refused(StatesError, lambda: states_from(torch.randn(4, 2, WIDTH), model, 2, positions=kept))
    refused(StatesError, lambda: states_from([rows], model, 2, positions=kept))
    refused(StatesError, lambda: states_from(rows, model, 2, positions=kept, attention_mask=[[1] * 4]))
    other = Observation(positions="shuffled")
    error = refused(OptionError, lambda: states_from(rows, model, 2, observe=other, positions=kept))
    assert error.message == f"positions {kept!r} and 'shuffled' were given."


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", [0, 1, 2, "final"])
def test_hidden_states_of_a_plain_pass(name: str, layer: int | str) -> None:
    model, truth = tiny(name), captured(name, EQUAL, layer)
    with torch.no_grad():
        outputs = model.module(torch.tensor(EQUAL), output_hidden_states=True, use_cache=True)
    for x in (outputs, outputs.hidden_states, list(outputs.hidden_states), dict(outputs)):
        close(states_from(x, model, layer), truth)
    close(states_from([one.numpy() for one in outputs.hidden_states], model, layer), truth)
    if layer == "final":
        states = states_from(outputs, model, observe="final")
        assert states.observation == Observation()  # at layer "final": one thing has one name
        assert states_from(states, model, observe="final").observation == Observation()
        close(states, truth)
        close(states_from({"last_hidden_state": outputs.hidden_states[-1]}, model, "final"), truth)


def test_the_last_of_hidden_states_is_not_the_last_block() -> None:
    model = tiny("llama")
    outputs = model.module(torch.tensor(EQUAL), output_hidden_states=True)
    error = refused(LayerError, lambda: states_from(outputs.hidden_states, model, L))
    assert error.message == "hidden_states[3] is what leaves the final norm, not the output of block 3."
    assert 'Ask for layer "final"' in error.hint
    final = states_from(outputs.hidden_states, model, "final").at(0, "final")
    assert not torch.allclose(final, captured("llama", EQUAL, L).at(0, L))
    assert states_from(outputs.hidden_states[1], model, L).layers == (L,)  # of one tensor it is as it is said


def test_as_many_prompts_as_hidden_states_are_prompts() -> None:
    prompts = [torch.randn(length, WIDTH) for length in (4, 4, 2, 4)]
    assert states_from(prompts, tiny("llama"), 2).lengths == (4, 4, 2, 4)
    assert states_from([prompts[0]] * (L + 1), tiny("llama"), 2).lengths == (4, 4, 4, 4)
    assert states_from([prompts[0]] * (L + 1), tiny("llama"), L).lengths == (4, 4, 4, 4)


def test_outputs_without_states() -> None:
    model = tiny("llama")
    outputs = model.module(torch.tensor(EQUAL), use_cache=False)
    error = refused(StatesError, lambda: states_from(outputs, model, 2))
    assert error.message == "These outputs hold no hidden_states."
    error = refused(StatesError, lambda: states_from(outputs, model, 2, observe="keys"))
    assert error.message == "These outputs hold no past_key_values."
    made = model.module.generate(
        torch.tensor(EQUAL), max_new_tokens=2, min_new_tokens=2, do_sample=False,
        output_hidden_states=True, return_dict_in_generate=True,
    )  # fmt: skip
    error = refused(StatesError, lambda: states_from(made, model, 2))
    assert "hidden_states[0] is the prompt's" in error.hint
    close(states_from(made.hidden_states[0], model, 2), captured("llama", EQUAL, 2))


def padded(prompts: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), longest, dtype=torch.long), torch.zeros(len(prompts), longest)
    for row, prompt in enumerate(prompts):
        place = slice(longest - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids, mask.long()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_of_plain_transformers(name: str, side: str) -> None:
    model, truth = tiny(name), captured(name, PROMPTS, 2)
    ids, mask = padded(PROMPTS, side)
    with torch.no_grad():
        outputs = model.module(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            output_hidden_states=True,
        )  # fmt: skip
    for given in (mask, mask.bool(), mask.numpy(), mask.tolist(), mask.float()):
        close(states_from(outputs, model, 2, attention_mask=given), truth)
    junk = outputs.hidden_states[2].masked_fill(mask[..., None] == 0, float("nan"))
    close(states_from(junk, model, 2, attention_mask=mask), truth)  # what is padding does not count
    with pytest.raises(StatesError, match="holds NaN"):
        states_from(junk, model, 2)


def test_masks_of_one_prompt_and_masks_of_ones() -> None:
    model, tensor = tiny("llama"), torch.randn(2, 4, WIDTH)
    assert states_from(tensor, model, 1, attention_mask=torch.ones(2, 4)).lengths == (4, 4)
    states = states_from(tensor[0], model, 1, attention_mask=[0, 1, 1, 0])
    assert torch.equal(states.at(0, 1), tensor[0, 1:3])
    states = states_from(tensor, model, 1, attention_mask=[[True, True, False, False], [1, 1, 1, 1]])
    assert torch.equal(states.at(1, 1), tensor[1])
    assert states.lengths == (2, 4)


MASKS: dict[str, tuple[Any, str]] = {
    "hole": ([[1, 1, 1, 1], [1, 0, 1, 1]], "The attention mask has a hole in prompt 1."),
    "nothing left": ([[1, 1, 1, 1], [0, 0, 0, 0]], "The attention mask leaves nothing of prompt 1."),
    "one row too many": ([[1] * 4] * 3, "The attention mask is 3 x 4, the states have 2 x 4 positions."),
    "too long": ([[1] * 5] * 2, "The attention mask is 2 x 5, the states have 2 x 4 positions."),
    "flat": ([1] * 8, "The attention mask is 1 x 8, the states have 2 x 4 positions."),
    "added to scores": (torch.zeros(2, 1, 4, 4), "its shape is (2, 1, 4, 4)."),
    "other numbers": ([[1, 1, 1, 2]] * 2, "is not 0 and 1"),
    "minus infinity": ([[0.0, 0, 0, float("-inf")]] * 2, "is not 0 and 1"),
    "NaN": ([[1.0, 1, 1, float("nan")]] * 2, "is not 0 and 1"),
    "ragged": ([[1, 1], [1]], "The attention mask is no array"),
    "text": ("1111", "The attention mask is no array"),
    "nothing": ([], "The attention mask is 1 x 0"),
}


@pytest.mark.parametrize(("mask", "message"), MASKS.values(), ids=MASKS)
def test_masks_that_cannot_be_meant(mask: Any, message: str) -> None:
    tensor = torch.randn(2, 4, WIDTH)
    error = refused(StatesError, lambda: states_from(tensor, tiny("llama"), 1, attention_mask=mask))
    assert message in error.message


def test_a_list_needs_no_mask() -> None:
    x = [torch.randn(4, WIDTH), torch.randn(2, WIDTH)]
    refused(OptionError, lambda: states_from(x, tiny("llama"), 1, attention_mask=[[1] * 4, [1, 1, 0, 0]]))


REFUSED: dict[str, tuple[Any, str]] = {
    "number": (torch.tensor(1.0), "shape () is not the states"),
    "nothing": (torch.zeros(0, WIDTH), "shape (0, 32) is not the states"),
    "no prompts": (torch.zeros(0, 4, WIDTH), "shape (0, 4, 32)"),
    "four axes": (torch.zeros(4, 2, 5, WIDTH), "shape (4, 2, 5, 32) is not the states of prompts."),
    "five axes": (torch.zeros(1, 1, 1, 1, WIDTH), "shape (1, 1, 1, 1, 32)"),
    "width": (torch.zeros(4, 31), "These states are 31 wide, those of LlamaForCausalLM are 32."),
    "more positions": (torch.zeros(129, WIDTH), "Prompt 0 has 129 positions"),
    "int64": (torch.zeros(4, WIDTH, dtype=torch.int64), "Numbers of type torch.int64 are no states."),
    "bool": (torch.zeros(4, WIDTH, dtype=torch.bool), "Numbers of type torch.bool"),
    "complex": (torch.zeros(4, WIDTH, dtype=torch.complex64), "Numbers of type torch.complex64"),
    "int8": (torch.zeros(4, WIDTH, dtype=torch.int8), "Numbers of type torch.int8"),
    "fp8": (torch.zeros(4, WIDTH).to(torch.float8_e4m3fn), "Numbers of type torch.float8_e4m3fn"),
    "int array": (np.zeros((4, WIDTH), np.int32), "Numbers of type torch.int32"),
    "objects": (np.array([[None]], dtype=object), "This array cannot be used"),
    "long double": (np.zeros((4, WIDTH), np.longdouble), "This array cannot be used"),
    "sparse": (torch.eye(WIDTH).to_sparse(), "A sparse tensor"),
    "meta": (torch.zeros(4, WIDTH, device="meta"), "A sparse tensor, or one without numbers"),
    "text": ("states.pt", "A str holds no states."),
    "nothing at all": (None, "A NoneType holds no states."),
    "numbers": ([[0.1] * WIDTH] * 4, "A list of lists holds no states."),
    "empty list": ([], "An empty list holds no states."),
    "empty dict": ({}, "These outputs hold no hidden_states."),
    "list of vectors": ([torch.zeros(WIDTH)] * 2, "Prompt 0 has shape (32,)."),
    "list of nothing": ([torch.zeros(2, WIDTH), torch.zeros(0, WIDTH)], "Prompt 1 has shape (0, 32)."),
    "list of widths": ([torch.zeros(2, WIDTH), torch.zeros(2, 8)], "Prompt 1 is 8 wide"),
    "list of types": (
        [torch.zeros(2, WIDTH), torch.zeros(2, WIDTH, dtype=torch.float64)],
        "Prompt 1 is 32 wide and torch.float64",
    ),
    "list of batches": ([torch.zeros(1, 2, WIDTH)] * 2, "2 tensors of prompt x position x d were given"),
    "hidden states without the first": ([torch.zeros(1, 2, WIDTH)] * L, "3 tensors of prompt x position x d"),
    "hidden states of two shapes": (
        [torch.zeros(1, 2, WIDTH)] * L + [torch.zeros(1, 3, WIDTH)],
        "4 tensors of prompt x position x d were given, of 2 shapes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("x", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_states(x: Any, message: str) -> None:
    error = refused(StatesError, lambda: states_from(x, tiny("llama"), 1))
    assert message in error.message
    if "int8" in message or "float8" in message:
        assert "scales" in error.hint


def test_layers_that_cannot_be_meant() -> None:
    model, tensor = tiny("llama"), torch.randn(4, WIDTH)
    error = refused(LayerError, lambda: states_from(tensor, model))
    assert error.message == "A bare tensor does not say its layer."
    refused(LayerError, lambda: states_from(tensor, model, 4))
    refused(LayerError, lambda: states_from(tensor, model, "1,2"))
    assert states_from(tensor, model, observe="final").layers == ("final",)
    assert states_from(tensor, model, "final", observe="final").layers == ("final",)
    refused(OptionError, lambda: states_from(tensor, model, 2, observe="final"))
    for place in ("attention", "mlp"):
        assert states_from(tensor, model, 2, observe=place).observation.place == place
        refused(OptionError, lambda place=place: states_from(tensor, model, 0, observe=place))
    refused(OptionError, lambda: states_from(tensor, model, 2, observe="sideways"))
    hidden = [torch.randn(1, 4, WIDTH)] * (L + 1)
    error = refused(OptionError, lambda: states_from(hidden, model, 2, observe="mlp"))
    assert error.message == "hidden_states hold no mlp."


def test_coordinates_that_were_kept_and_rotations() -> None:
    model = tiny("llama")
    kept = Observation(kept=(5, 1, 30))
    assert states_from(torch.randn(4, 3), model, 2, observe=kept).d_model == 3
    refused(StatesError, lambda: states_from(torch.randn(4, WIDTH), model, 2, observe=kept))
    turned = Observation(rotation=torch.eye(WIDTH))
    assert states_from(torch.randn(4, WIDTH), model, 2, observe=turned).observation is turned


def test_states_are_passed_through() -> None:
    model, states = tiny("llama"), captured("llama", PROMPTS, 2)
    assert states_from(states, model) is states
    assert states_from(states, model, 2) is states
    _, mask = padded(PROMPTS, "left")
    assert states_from(states, model, attention_mask=mask) is states
    mask[2, 0] = 0
    refused(StatesError, lambda: states_from(states, model, attention_mask=mask))
    told = states_from(states, model, observe=Observation(stored="int8", permuted=True), positions="shuffled")
    assert told.observation == Observation(stored="int8", permuted=True, positions="shuffled")
    assert states.observation == Observation()  # they are as they were
    same_numbers(told, states)
    assert states_from(told, model, observe="residual").observation == told.observation
    for observe in (
        Observation("keys"),
        Observation("final"),
        Observation(stored="fp8"),
        Observation(positions="last"),
    ):
        refused(StatesError, lambda observe=observe: states_from(told, model, observe=observe))
    turned = states_from(states, model, observe=Observation(rotation=torch.eye(WIDTH)))
    other = Observation(rotation=torch.eye(WIDTH))
    error = refused(StatesError, lambda: states_from(turned, model, observe=other))
    assert error.message == "Another rotation was given than these states have."
    assert states_from(turned, model, observe=turned.observation).observation == turned.observation


def test_what_is_inverted_may_come_through_any_door() -> None:
    model = preimage.models.new_model("llama", (16, 2, 2), vocabulary=50, max_length=16, device="cpu")
    prompts = [[7, 3, 9], [4, 5, 6, 8, 2]]
    ids, mask = padded(prompts, "left")
    with torch.no_grad():
        outputs = model.module(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            output_hidden_states=True,
        )  # fmt: skip
    found = preimage.invert(model, outputs.hidden_states, 1, attention_mask=mask, proposers="prior")
    assert [list(result.token_ids) for result in found] == prompts
    refused(OptionError, lambda: preimage.invert(model, outputs, 1, prefix=[5], method="sipit"))
