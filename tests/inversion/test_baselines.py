"""Baselines that read a prompt in their own way: what they read, and that verification decides."""

import itertools
import json

import pytest
import torch

import preimage
from preimage.errors import OptionError
from preimage.inversion import HardPromptSettings, VocabularyMatchSettings
from preimage.inversion.errands import _as_told, _told
from preimage.inversion.options import READERS
from support.refusing import refused
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", NAMES)
def test_vocabulary_matching_is_exact(name: str, length: int) -> None:  # I1
    model, ids = tiny(name), random_ids(length, seed=length)
    states = preimage.capture(model, [ids])
    for layer in states.layers:
        (found,) = preimage.invert(model, states, layer, method="vocabulary-match")
        assert (found.status, found.token_ids, found.method) == ("recovered", tuple(ids), "vocabulary-match")
        assert found.reading.token_ids == tuple(ids)
        assert len(found.positions) == length


def test_matching_tries_few_where_the_model_expects_the_token() -> None:
    """Candidates come as the model expects them: a prompt the model wrote itself costs a batch a position."""
    model = tiny("llama")
    ids = [5]
    for _ in range(6):
        hidden = model.states(torch.tensor([ids]), ("final",))["final"][0, -1]
        ids.append(int((model.unembedding @ hidden).argmax()))
    states = preimage.capture(model, [ids], layers=2)
    settings = VocabularyMatchSettings(batch=1)
    (found,) = preimage.invert(model, states, method="vocabulary-match", vocabulary_match=settings)
    assert found.status == "recovered"
    tried = found.tests
    assert tried < VOCABULARY + len(ids), "but for the first token, one candidate a position"


def test_noise_leaves_a_reading_that_is_not_verified() -> None:
    model, ids = tiny("llama"), random_ids(6)
    states = preimage.capture(model, [ids], layers=2).at(0, 2)
    noisy = states + 0.02 * states.norm(dim=-1, keepdim=True) * torch.randn_like(states) / 32**0.5
    (found,) = preimage.invert(model, noisy, 2, method="vocabulary-match")
    assert found.status == "not_recovered"
    assert found.reading.token_ids == tuple(ids)
    assert found.reading.confidence == (0.0,) * 6
    assert found.failed_position == 0
    assert "position 0" in found.reason


@pytest.mark.parametrize("method", READERS)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_baseline_claims_is_what_fits(method: str, seed: int) -> None:
    """Beside enumeration: a claim of one prompt is the only one that fits, whatever was read."""
    vocabulary = 5
    module = build("gpt2", seed, vocab_size=vocabulary)
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table[3] = table[1] + 10.0 ** (-8 + 2 * seed) * torch.randn(table.shape[1])
    model = preimage.load(module)
    for ids in itertools.product(range(vocabulary), repeat=2):
        states = preimage.capture(model, [ids], layers=1)
        (found,) = preimage.invert(model, states, method=method, hard_prompts=HardPromptSettings(steps=20))
        (ours,) = preimage.invert(model, states, method="brute-force")
        if found.status == "recovered":
            assert ours.status == "recovered"
            assert found.token_ids == ours.token_ids == ids
        elif found.status == "ambiguous":
            assert ids in found.alternatives
            assert set(found.alternatives) == set(ours.alternatives)
        else:
            assert found.reading.token_ids != ids


def test_hard_prompts_descend() -> None:
    """A prompt of one token is found in far fewer steps than there are tokens to try at random."""
    model, states = tiny("llama"), preimage.capture(tiny("llama"), [[token] for token in range(20)], layers=1)
    results = preimage.invert(model, states, method="hard-prompts", hard_prompts=HardPromptSettings(steps=12))
    found = sum(one.status == "recovered" for one in results)
    assert found >= 14, "twelve draws of 41 tokens would find 6"
    assert all(one.claims([index]) for index, one in enumerate(results) if one.status == "recovered")


def test_the_budget_of_hard_prompts_is_the_published_one_and_counted() -> None:
    assert HardPromptSettings().steps_for(20, 50_257) == 20 * 50_257 // 4
    model = tiny("llama")
    rows = preimage.capture(model, [random_ids(5)], layers=2).at(0, 2) + 3.0  # no prompt made these
    (found,) = preimage.invert(
        model, rows, 2, method="hard-prompts", hard_prompts=HardPromptSettings(steps=9)
    )
    assert found.status == "not_recovered"
    assert found.forward_tokens == 9 * 5 + 5, "nine steps, and the pass that verifies"
    assert len(found.reading.token_ids) == 5
    again = preimage.invert(model, rows, 2, method="hard-prompts", hard_prompts=HardPromptSettings(steps=9))
    assert again[0].reading == found.reading, "the seed decides"


def test_a_timeout_ends_with_what_was_read() -> None:
    model = tiny("llama")
    rows = preimage.capture(model, [random_ids(5)], layers=2).at(0, 2) + 3.0
    for method in ("hard-prompts", "vocabulary-match"):
        (found,) = preimage.invert(model, rows, 2, method=method, timeout=1e-9)
        assert found.status == "not_recovered"
        assert "Stopped: the time limit" in found.reason
    (found,) = preimage.invert(model, rows, 2, method="vocabulary-match", max_tests=2 * VOCABULARY)
    assert len(found.reading.token_ids) == 2
    assert f"the budget of {2 * VOCABULARY} tests is spent" in found.reason


def test_embeddings_are_read_where_they_are() -> None:
    model, ids = tiny("llama"), random_ids(7)
    states = preimage.capture(model, [ids], layers=[0, "final"])
    (found,) = preimage.invert(model, states, 0, method="nearest-embedding")
    assert (found.status, found.token_ids) == ("recovered", tuple(ids))
    hidden = states.at(0, "final")
    expected = (hidden @ model.unembedding.T).argmax(dim=-1).tolist()
    (found,) = preimage.invert(model, states, "final", method="logit-lens")
    assert found.reading.token_ids == tuple(expected)


def test_settings_reach_workers_and_json() -> None:
    options = preimage.InvertOptions(
        method="hard-prompts", hard_prompts=HardPromptSettings(steps=7, learning_rate=0.5)
    )
    assert _as_told(json.loads(json.dumps(_told(options, ())))).hard_prompts == options.hard_prompts
    assert options.to_dict()["hard_prompts"] == {"steps": 7, "learning_rate": 0.5, "weight_decay": 0.1}


def test_refusals() -> None:
    model = tiny("llama")
    states = preimage.capture(model, [random_ids(4)], layers=2, positions="last")
    for method in READERS:
        error = refused(OptionError, lambda method=method: preimage.invert(model, states, method=method))
        assert f"{method} needs the states of every position" in error.message
        error = refused(OptionError, lambda method=method: preimage.InvertOptions(method=method, prefix="a"))
        assert "takes no known prefix" in error.message
        refused(OptionError, lambda method=method: preimage.InvertOptions(method=method, published_cost=True))
    for wrong in ({"steps": 0}, {"learning_rate": 0.0}, {"weight_decay": -1.0}):
        error = refused(OptionError, lambda wrong=wrong: HardPromptSettings(**wrong))
        assert next(iter(wrong)) in error.message
    for wrong in ({"batch": 0}, {"threshold": 0.0}):
        error = refused(OptionError, lambda wrong=wrong: VocabularyMatchSettings(**wrong))
        assert next(iter(wrong)) in error.message
    keys = preimage.capture(model, [random_ids(4)], layers=2, observe="keys")
    for method in ("nearest-embedding", "logit-lens"):
        error = refused(OptionError, lambda method=method: preimage.invert(model, keys, method=method))
        assert method in error.message
