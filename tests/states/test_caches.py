"""Caches of real passes: keys and values of a block, position by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from preimage import Observation, states_from
from preimage.errors import LayerError, OptionError, StatesError
from support.refusing import refused
from support.tiny import NAMES, build, random_ids, tiny

IDS = torch.tensor([random_ids(4, seed) for seed in range(2)])  # shorter than any window
LONG = torch.tensor([random_ids(9, seed) for seed in range(2)])
WINDOWED = ("mistral", "gemma2", "gemma3")


def run(name: str, ids: torch.Tensor, **given: Any) -> Any:
    with torch.no_grad():
        return tiny(name).module(ids, use_cache=True, output_hidden_states=True, **given)


def projected(name: str, ids: torch.Tensor, block: int, which: str) -> torch.Tensor:
    """What a projection of a block gives, from outside."""
    found: list[torch.Tensor] = []
    layer = tiny(name).anatomy.blocks[block - 1]
    module = next(part for path, part in layer.named_modules() if path.endswith(which))
    handle = module.register_forward_hook(lambda _module, _args, output: found.append(output))
    run(name, ids)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["keys", "values", "kv", None])
def test_every_block_of_a_cache(name: str, place: str | None) -> None:
    model, outputs = tiny(name), run(name, IDS)
    cache = outputs.past_key_values
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    arrays = [[keys.numpy(), values.numpy()] for keys, values in pairs]
    for block in (1, 2, 3):
        keys, values = (part.transpose(1, 2).reshape(2, 4, -1) for part in pairs[block - 1])
        expected = {"keys": keys, "values": values}.get(str(place), torch.cat([keys, values], dim=-1))
        doors = [cache, pairs, arrays, tuple(cache)]
        for x in [*doors, outputs] if place else doors:
            states = states_from(x, model, block, observe=place)
            assert (states.layers, states.lengths) == ((block,), (4, 4))
            assert states.observation == Observation(place or "kv")
            for prompt in range(2):
                assert torch.equal(states.at(prompt, block), expected[prompt])
    assert states_from(cache, model).layers == (1,)


@pytest.mark.parametrize(("name", "which"), [("llama", "v_proj"), ("qwen3", "v_proj"), ("gemma3", "v_proj")])
def test_values_are_what_the_projection_gives(name: str, which: str) -> None:
    states = states_from(run(name, IDS), tiny(name), 2, observe="values")
    expected = projected(name, IDS, 2, which)
    assert torch.equal(torch.stack([states.at(0, 2), states.at(1, 2)]), expected)
    assert torch.equal(states_from(expected, tiny(name), 2, observe="values").at(0, 2), expected[0])


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_with_their_heads(name: str) -> None:
    model, cache = tiny(name), run(name, IDS).past_key_values
    for place, part in (("keys", cache.layers[1].keys), ("values", cache.layers[1].values)):
        expected = states_from(cache, model, 2, observe=place)
        for x in (part, part.numpy()):
            states = states_from(x, model, 2, observe=place)
            assert torch.equal(states.at(1, 2), expected.at(1, 2))
        error = refused(StatesError, lambda x=part: states_from(x, model, 2))
        assert "hidden_states as the tuple" in error.hint
        refused(StatesError, lambda x=part: states_from(x, model, 2, observe="kv"))
        turned = part.transpose(1, 3)
        error = refused(StatesError, lambda x=turned, p=place: states_from(x, model, 2, observe=p))
        assert f"{part.shape[1]} heads x position x {part.shape[3]}" in error.hint


@pytest.mark.parametrize("place", ["keys", "values", "kv"])
def test_another_width_is_named_with_both(place: str) -> None:
    width = 32 if place == "kv" else 16
    called = "keys and values" if place == "kv" else place
    error = refused(StatesError, lambda: states_from(torch.randn(4, 30), tiny("llama"), 2, observe=place))
    assert error.message == f"These {called} are 30 wide, those of LlamaForCausalLM are {width}."
    assert states_from(torch.randn(4, width), tiny("llama"), 2, observe=place).d_model == width


def test_a_cache_of_another_model() -> None:
    cache = run("gpt2", IDS).past_key_values  # four heads, where the other has two
    error = refused(StatesError, lambda: states_from(cache, tiny("llama"), 1))
    assert error.message == "These keys and values are 64 wide, those of LlamaForCausalLM are 32."
    deeper = build("llama", num_hidden_layers=5)
    with torch.no_grad():
        cache = deeper(IDS, use_cache=True).past_key_values
    error = refused(StatesError, lambda: states_from(cache, tiny("llama"), 1))
    assert error.message == "This cache holds 5 blocks, the model has 3."


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_static_caches_hold_what_was_filled(name: str) -> None:
    model = tiny(name)
    cache = StaticCache(config=model.module.config, max_cache_len=16)
    plain = run(name, IDS).past_key_values
    run(name, IDS, past_key_values=cache)
    for block in (1, 2, 3):
        states, truth = states_from(cache, model, block), states_from(plain, model, block)
        assert states.lengths == (4, 4)
        torch.testing.assert_close(states.at(1, block), truth.at(1, block))


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_that_dropped_tokens_are_refused(name: str) -> None:
    model, cache = tiny(name), run(name, LONG).past_key_values
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    static = StaticCache(config=model.module.config, max_cache_len=16)
    run(name, LONG, past_key_values=static)
    windows = {1, 2, 3} if name == "mistral" else {1, 3}
    for x in (cache, static) if name == "mistral" else (cache, static, pairs):
        for block in windows:
            error = refused(StatesError, lambda x=x, block=block: states_from(x, model, block))
            assert f"Block {block} of this cache keeps " in error.message
            assert " of 9 tokens" in error.message
    if name == "mistral":
        refused(StatesError, lambda: states_from(cache, model))
    else:
        assert states_from(cache, model, 2).lengths == (9, 9)
        assert states_from(cache, model).layers == (2,)  # the lowest that is whole
        assert error.hint == "Choose a block that is whole: 2."
    everything = DynamicCache()
    run(name, LONG, past_key_values=everything)
    assert states_from(everything, model, 1).lengths == (9, 9)


def test_padded_caches() -> None:
    model = tiny("llama")
    short = IDS[:1, :3]
    ids = torch.cat([torch.cat([torch.zeros(1, 1, dtype=torch.long), short], dim=1), IDS[1:]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = run("llama", ids, attention_mask=mask, position_ids=positions).past_key_values
    states = states_from(cache, model, 2, attention_mask=mask)
    assert states.lengths == (3, 4)
    truth = states_from(run("llama", short).past_key_values, model, 2)
    torch.testing.assert_close(states.at(0, 2), truth.at(0, 2))


def test_what_no_cache_holds() -> None:
    model, outputs = tiny("llama"), run("llama", IDS)
    cache = outputs.past_key_values
    for place in ("residual", "final", "attention", "mlp"):
        error = refused(OptionError, lambda place=place: states_from(cache, model, 1, observe=place))
        assert error.message == f"A cache holds keys and values, not {place}."
    for layer in (0, "final"):
        refused(OptionError, lambda layer=layer: states_from(cache, model, layer))
    refused(LayerError, lambda: states_from(cache, model, 4))
    for empty in (DynamicCache(), StaticCache(config=model.module.config, max_cache_len=8)):
        error = refused(StatesError, lambda empty=empty: states_from(empty, model, 1))
        assert error.message == "This cache is empty."
    part = DynamicCache()
    part.update(cache.layers[1].keys, cache.layers[1].values, 1)
    error = refused(LayerError, lambda: states_from(part, model, 1))
    assert str(error) == "This cache holds nothing of block 1. It holds 2."
    assert states_from(part, model).layers == (2,)
    refused(StatesError, lambda: states_from(cache, model, 1, positions="last"))
    pairs = [[layer.keys, layer.values[:, :, 1:]] for layer in cache.layers]
    refused(StatesError, lambda: states_from(pairs, model, 1))
    pairs = [[layer.keys.to(torch.int8), layer.values.to(torch.int8)] for layer in cache.layers]
    error = refused(StatesError, lambda: states_from(pairs, model, 1))
    assert "scales" in error.hint
    cache.layers[0].keys[1, 0, 2, 3] = float("nan")
    error = refused(StatesError, lambda: states_from(cache, model, 1))
    assert error.message == "Prompt 1, layer 1, position 2 holds NaN or infinity."
    assert states_from(cache, model, 1, observe="values").lengths == (4, 4)


def test_a_cache_says_in_what_it_was_stored() -> None:
    module = build("llama", dtype=torch.bfloat16)
    cache = module(IDS, use_cache=True).past_key_values
    states = states_from(cache, tiny("llama"), 2, observe=Observation("keys", stored="bf16"))
    assert (states.dtype, states.observation.stored) == (torch.bfloat16, "bf16")
