"""Architectures with ways of their own: registered in one place, refused by name where they do not fit."""

from __future__ import annotations

import pytest
import torch
import transformers

import preimage
from preimage.errors import ModelError
from preimage.models import quirks
from support.refusing import refused
from support.tiny import build, random_ids

SHAPE = {"vocab_size": 41, "hidden_size": 32, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
STATEFUL = {
    "recurrent_gemma": transformers.RecurrentGemmaConfig(
        **SHAPE, intermediate_size=48, num_hidden_layers=3, num_key_value_heads=1, attention_window_size=16
    ),
    "minimax": transformers.MiniMaxConfig(
        **SHAPE, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=2, num_local_experts=2
    ),
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_model_whose_prefix_is_a_state_is_captured_and_not_inverted(kind: str) -> None:
    torch.manual_seed(0)
    model = preimage.load(transformers.AutoModelForCausalLM.from_config(STATEFUL[kind]))
    assert model.config.model_type == kind
    assert model.receptive_field(2) is None
    states = preimage.capture(model, [random_ids(5)], layers=[2])
    error = refused(ModelError, lambda: preimage.invert(model, states, 2))
    assert f"{type(model.module).__name__} cannot be inverted" in error.message


def test_local_blocks_of_gpt_neo_look_back_a_window() -> None:
    shape = {"vocab_size": 41, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 5}
    config = transformers.GPTNeoConfig(
        **shape, attention_types=[[["local"], 2]], max_position_embeddings=64, bos_token_id=1, eos_token_id=2
    )
    model = preimage.load(transformers.AutoModelForCausalLM.from_config(config))
    assert model.receptive_field(2) == 1 + 2 * 4
    long = [7, *random_ids(20)]
    other = [8, *long[1:]]
    states = preimage.capture(model, [long, other], layers=[2])
    assert torch.equal(states.at(0, 2)[12:], states.at(1, 2)[12:])
    assert not torch.equal(states.at(0, 2)[1], states.at(1, 2)[1])


def test_a_quirk_is_added_by_registering_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quirks, "_QUIRKS", dict(quirks._QUIRKS))
    quirks.register_quirk("llama", quirks.Quirk(no_prefix="somebody said so"))
    model = preimage.load(build("llama"))
    states = preimage.capture(model, [random_ids(4)], layers=[1])
    error = refused(ModelError, lambda: preimage.invert(model, states, 1))
    assert "somebody said so" in error.message
