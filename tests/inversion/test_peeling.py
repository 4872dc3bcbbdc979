"""States carried down by undoing blocks: how far that goes, and what is read there."""

import pytest
import torch

import preimage
from preimage.errors import OptionError
from preimage.inversion.proposers.peeling import lowered, lowest_layer
from preimage.inversion.proposers.registry import build_proposer
from preimage.models import new_model
from support.refusing import refused
from support.tiny import build, random_ids, tiny


def off(states: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    return (states - true).norm(dim=-1) / true.norm(dim=-1)


@pytest.mark.parametrize("name", ["gpt2", "opt", "qwen3", "mixtral"])
def test_blocks_that_add_little_are_undone(name: str) -> None:
    model, ids = tiny(name), torch.tensor([random_ids(10, seed) for seed in (1, 2)])
    true = model.states(ids, (0, 1, 3))
    valid = torch.ones_like(ids, dtype=torch.bool)
    assert lowest_layer(model, 3) == 0
    assert off(lowered(model, true[3], 3, 1, valid), true[1]).max() < 0.1
    assert off(lowered(model, true[3], 3, 0, valid), true[0]).median() < 0.1


def test_what_stands_behind_a_prompt_is_not_looked_at() -> None:
    model, ids = tiny("llama"), torch.tensor([random_ids(10)])
    states = model.states(ids, (3,))[3]
    short = lowered(model, states, 3, 0, torch.ones_like(ids, dtype=torch.bool))
    padded = torch.nn.functional.pad(states, (0, 0, 0, 4), value=50.0)
    valid = torch.arange(14)[None] < 10
    assert off(lowered(model, padded, 3, 0, valid)[:, :10], short).max() < 0.05


def test_it_stops_above_a_block_that_cannot_be_undone() -> None:
    module = build("llama")
    with torch.no_grad():
        for weight in module.model.layers[1].mlp.parameters():
            weight.mul_(40)
    model = preimage.load(module)
    assert lowest_layer(model, 3) == 2
    assert "peel" not in build_proposer(model, 3).name
    (result,) = preimage.invert(model, preimage.capture(model, [random_ids(8)], 3), proposers="peel")
    assert (result.status, list(result.token_ids)) == ("recovered", random_ids(8))


def test_a_deep_model_that_was_not_trained_is_read_at_once() -> None:
    """At its own layer a codebook finds hardly a token; undone, the blocks hide none."""
    model = new_model("gpt2", (64, 10, 4), vocabulary=5000, max_length=64, device="cpu")
    ids = torch.randint(5000, (4, 40), generator=torch.Generator().manual_seed(3)).tolist()
    found = preimage.invert(model, preimage.capture(model, ids, 10))
    assert [list(one.token_ids) for one in found] == ids
    assert {one.proposer for one in found} == {"peel-0"}
    assert max(one.tests for one in found) < 160


def test_what_has_no_layer_is_refused() -> None:
    model, ids = tiny("llama"), random_ids(6)
    keys = preimage.capture(model, [ids], 2, observe="keys")
    refused(OptionError, lambda: preimage.invert(model, keys, 2, proposers="peel"))
    final = preimage.capture(model, [ids], "final")
    refused(OptionError, lambda: preimage.invert(model, final, "final", proposers="peel"))
