"""The first token: a sink that little is read from, and that nothing stands before."""

from __future__ import annotations

from dataclasses import replace

import torch

import preimage
from preimage import InvertOptions
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.expectation import likely_first, special_tokens
from preimage.inversion.engine.first_states import first_states, known_first_states
from preimage.inversion.engine.judgement import begins_oddly
from preimage.inversion.inverter import Inverter
from preimage.inversion.preparing import prepare
from preimage.models import LanguageModel, new_model
from support.tiny import random_ids, tiny


def large() -> LanguageModel:
    """More tokens than are tried in full before evidence is asked."""
    return new_model("llama", (32, 2, 4), vocabulary=5000, max_length=64, device="cpu")


def test_a_wrong_first_token_of_exact_states_is_set_right() -> None:
    model, ids = large(), [4321, *random_ids(15, 2)]
    states = preimage.capture(model, [ids], 2)
    (right,) = preimage.invert(model, states)
    assert right.status == "recovered"
    work = Inverter(model, prepare(model, states, 2, None, InvertOptions()), InvertOptions())
    work.batches([0])
    rows = states.at(0, 2)
    wrong = (17, *ids[1:])
    likely = replace(right, status="likely", token_ids=wrong, reading=right.reading._replace(token_ids=wrong))
    found = work._with_exact_first(likely, rows, Budget(10**6, None))
    assert (found.status, list(found.token_ids)) == ("recovered", ids)
    noisy = rows + 0.01 * torch.randn(rows.shape)
    assert work._with_exact_first(likely, noisy, Budget(10**6, None)) == likely  # nothing fits exactly


def test_only_a_decaying_difference_is_odd() -> None:
    model, ids = tiny("llama"), random_ids(16)
    (result,) = preimage.invert(model, preimage.capture(model, [ids], 2))

    def off(by: list[float]) -> preimage.Inversion:
        places = zip(result.positions, by, strict=True)
        return replace(
            result, positions=tuple(one._replace(distance=away * one.radius) for one, away in places)
        )

    assert begins_oddly(off([100 / (1 + place) for place in range(16)]))
    assert not begins_oddly(off([100.0] * 16))
    assert not begins_oddly(off([1000.0] + [100.0] * 15))  # the first state itself says nothing


def test_special_tokens_come_first() -> None:
    model = tiny("llama")
    order = likely_first(model)
    assert sorted(order.tolist()) == list(range(model.vocab_size))
    assert order[: len(special_tokens(model))].tolist() == special_tokens(model)
    assert likely_first(model) is order  # found out once


def test_first_states_are_those_of_prompts_of_one_token_and_are_known_once() -> None:
    model = large()
    assert known_first_states(model, 2) is None
    assert first_states(model, 2) is None  # too many to be run at once
    states = first_states(model, 2, patiently=True)
    assert states is not None
    assert known_first_states(model, 2) is states
    own = model.states(torch.tensor([[4321]]), (2,))[2][0, 0]
    assert torch.allclose(states[4321], own, atol=1e-5)
    with torch.no_grad():
        model.module.get_input_embeddings().weight[4321] += 1.0
    assert known_first_states(model, 2) is None  # of other weights
