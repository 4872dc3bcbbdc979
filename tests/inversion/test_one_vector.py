"""Prompts of several tokens from one vector: the last state, or the mean over positions."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

import preimage
from preimage.inversion.engine import last_position, verifier
from preimage.inversion.engine.last_position import invert_last, one_vector_budget, prepare_last
from preimage.inversion.engine.outcomes import make_result, say_of_last
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.options import InvertOptions
from preimage.inversion.result import Inversion
from preimage.models import LanguageModel, new_model
from preimage.states import States, noise_of
from support.tiny import NAMES, build, tiny

VOCABULARY = 50


def small(family: str, blocks: int) -> LanguageModel:
    return new_model(family, (16, blocks, 2), vocabulary=VOCABULARY, max_length=16, device="cpu")


def prompts(length: int, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of different tokens: constant ones are another matter."""
    draw = random.Random(seed)
    return [draw.sample(range(VOCABULARY), length) for _ in range(count)]


def last_alone(vector: Tensor, layer: int | str) -> States:
    """One vector as the last state of a prompt."""
    states = States.from_tensor(vector[None], layer)
    layout = dataclasses.replace(states.layout, positions="last")
    return States(layout, states.store, token_ids=None, model=None, noise_floor={}, dtype=states.dtype)


def from_mean(
    model: LanguageModel, vector: Tensor, layer: int, max_tests: int | None = None, **changes: object
) -> Inversion:
    """What is said of a mean over positions."""
    verifier = Verifier(model, layer, noise=noise_of(model, layer)[layer])
    budget = one_vector_budget(max_tests, None)
    outcome = invert_last(model, vector[None], verifier, budget, positions="mean", **changes)
    result = make_result(model, outcome, verifier, InvertOptions(), budget.tests)
    return say_of_last(result, outcome.tried)


def test_a_vector_that_nothing_fits_is_read_with_little_confidence() -> None:
    """The nearest prompt is shown; of what was found by trying few others nothing is sure."""
    model, found = small("llama", 3), 0
    for ids in prompts(6, 8):
        last = preimage.capture(model, [ids], layers=3).at(0, 3)[-1]
        (result,) = preimage.invert(model, last_alone(last, 3), 3, max_tests=2000)
        if result.status == "not_recovered":
            read, sure = result.reading.token_ids, result.reading.confidence
            assert len(read) == len(sure) > 0
            assert all(0 <= one <= 0.9 for one in sure)
            found += read[-1] == ids[-1]
    assert found >= 4


# Found and certified.


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("length", [2, 3])
def test_short_prompts_are_found_from_their_last_state(family: str, blocks: int, length: int) -> None:
    model = small(family, blocks)
    for layer in (blocks, "final"):
        made = prompts(length, 3)
        states = preimage.capture(model, made, layers=layer, positions="last")
        for ids, found in zip(made, preimage.invert(model, states), strict=True):
            assert (found.status, found.token_ids) == ("recovered", tuple(ids)), found.reason
            assert (found.unique, found.complete) == ("tested", True)
            assert "nothing is proved" in found.uniqueness
            assert f"all {VOCABULARY} prompts of one token" in found.uniqueness
            assert len(found.positions) == length
            assert all(one.distance <= one.radius and one.tests > 1 for one in found.positions)
            assert found.margin is not None
            assert found.margin > found.positions[0].radius


def test_every_token_alone_is_found() -> None:
    model = small("gpt2", 2)
    made = [[token] for token in range(VOCABULARY)]
    states = preimage.capture(model, made, layers=2, positions="last")
    for ids, found in zip(made, preimage.invert(model, states), strict=True):
        assert (found.status, found.token_ids, found.unique) == ("recovered", tuple(ids), "tested")


def test_longer_prompts_are_found_or_said_not_to_be() -> None:
    model = small("gpt2", 2)
    made = prompts(4, 4) + prompts(6, 1)
    states = preimage.capture(model, made, layers=2, positions="last")
    found = preimage.invert(model, states, max_tests=6000)
    assert sum(one.status == "recovered" for one in found[:4]) >= 2
    for ids, one in zip(made, found, strict=True):
        assert one.status != "recovered" or one.token_ids == tuple(ids)
        assert one.status != "not_recovered" or "every position" in one.reason


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_found_in_every_architecture(name: str) -> None:
    states = preimage.capture(tiny(name), [[8, 5], [3, 40]], layers=2, positions="last")
    for ids, found in zip(([8, 5], [3, 40]), preimage.invert(tiny(name), states), strict=True):
        assert found.claims(ids), (found.status, found.reason)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_short_prompts_are_found_from_their_mean(family: str) -> None:
    model = small(family, 2)
    for ids in prompts(2, 2) + prompts(3, 2):
        vector = model.states(torch.tensor([ids]), (2,))[2][0].mean(dim=0)
        found = from_mean(model, vector, 2)
        assert (found.status, found.token_ids, found.unique) == ("recovered", tuple(ids), "tested")
    one = from_mean(model, model.states(torch.tensor([[7]]), (2,))[2][0, 0], 2)
    assert one.claims([7])


# What no prompt made, and what several did.


def test_vectors_that_no_prompt_made_are_never_recovered() -> None:
    for family in ("gpt2", "llama"):
        model = small(family, 2)
        last = model.states(torch.tensor(prompts(3, 2)), (2,))[2][:, -1]
        noise = torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
        made_up = torch.cat([
            last[:2].mean(dim=0, keepdim=True),
            last + 1e-3 * last.norm(dim=1, keepdim=True) * noise / 4,
            last.norm(dim=1, keepdim=True) * noise / 4,
        ])  # fmt: skip
        for vector in made_up:
            (found,) = preimage.invert(model, last_alone(vector, 2), max_tests=3000)
            assert found.status == "not_recovered"
            assert found.failed_distance is not None
            assert found.failed_distance > found.positions[0].radius
            assert from_mean(model, vector, 2, max_tests=3000).status == "not_recovered"


def test_twins_are_listed_at_every_slot() -> None:
    module = build("gpt2")
    with torch.no_grad():
        module.transformer.wte.weight[11] = module.transformer.wte.weight[5]
    model = preimage.load(module)
    states = preimage.capture(model, [[5, 8, 11]], layers=2, positions="last")
    (found,) = preimage.invert(model, states)
    assert found.status == "ambiguous"
    assert set(found.alternatives) == {(a, 8, b) for a in (5, 11) for b in (5, 11)}


def test_near_embeddings_are_tried_before_a_prompt_stands_alone() -> None:
    module = build("gpt2")
    with torch.no_grad():
        table = module.transformer.wte.weight
        table[11] = table[5] * (1 + 1e-7)
        table[11, 0] += 1e-9
    model = preimage.load(module)
    states = preimage.capture(model, [[5, 8]], layers=2, positions="last")
    (found,) = preimage.invert(model, states)
    assert found.status == "ambiguous"
    assert {(5, 8), (11, 8)} <= set(found.alternatives)


def test_tokens_behind_a_window_are_not_claimed() -> None:
    model = preimage.load(build("mistral", sliding_window=2))
    states = preimage.capture(model, [[30, 9, 4]], layers=1, positions="last")
    (found,) = preimage.invert(model, states)  # block 1 sees the last two tokens alone
    assert found.status == "ambiguous"
    assert {(9, 4), (9, 9, 4)} <= set(found.alternatives)
    assert not found.complete
    assert found.reason


def test_prompts_in_another_order_are_not_claimed_without_positions() -> None:
    module = build("gpt2")
    with torch.no_grad():
        module.transformer.wpe.weight.zero_()
    model = preimage.load(module)
    states = preimage.capture(model, [[30, 9, 4]], layers=1, positions="last")
    (found,) = preimage.invert(model, states)
    assert found.status == "ambiguous"
    assert {(30, 9, 4), (9, 30, 4)} <= set(found.alternatives)


def test_a_search_content_with_too_little_is_told_by_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other prompts tried are not far by a wide tolerance, and so the one that fits does not stand alone."""
    model = small("gpt2", 2)
    ids = prompts(2, 1)[0]
    states = preimage.capture(model, [ids], layers=2, positions="last")
    (near,) = preimage.invert(model, states, tolerance=1e-2)
    assert near.status == "ambiguous"
    assert tuple(ids) in near.alternatives
    monkeypatch.setattr(verifier, "FAR", 0.0)
    (fooled,) = preimage.invert(model, states, tolerance=1e-2)
    assert fooled.status == "recovered"  # what the line is there for


# Budgets.


@pytest.mark.parametrize("max_tests", [1, 49, 60, 500, 3000])
def test_tests_are_never_more_than_the_budget(max_tests: int) -> None:
    model = small("llama", 2)
    states = preimage.capture(model, prompts(4, 2), layers=2, positions="last")
    for found in preimage.invert(model, states, max_tests=max_tests):
        assert found.tests <= max_tests
        assert found.status != "recovered" or found.tests < max_tests
        assert found.status != "not_recovered" or max_tests >= VOCABULARY or "Stopped after" in found.reason


def test_time_ends_the_search() -> None:
    model = small("llama", 2)
    prepare_last(model, Verifier(model, 2, noise=noise_of(model, 2)[2]))
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0))
    (found,) = preimage.invert(model, last_alone(vector, 2), timeout=0.3)
    assert found.status == "not_recovered"
    assert 0.3 <= found.seconds < 5.0  # a busy machine may take its time over one batch


def test_the_default_search_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gpt2", 2)
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(last_position, "_TESTS_AT_LEAST", 100)
    monkeypatch.setattr(last_position, "_PAIRS", 0)
    (found,) = preimage.invert(model, last_alone(vector, 2))
    assert found.tests == VOCABULARY + last_position._TESTS * VOCABULARY
    monkeypatch.setattr(last_position, "SECONDS", 0.0)
    (found,) = preimage.invert(model, last_alone(vector, 2))
    assert found.tests == VOCABULARY  # every token has its try, whatever the search may take


def test_the_same_call_tries_the_same_prompts() -> None:
    model = small("llama", 2)
    states = preimage.capture(model, prompts(5, 2), layers=2, positions="last")
    first, second = (preimage.invert(model, states, max_tests=3000) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        same = dataclasses.replace(other, seconds=one.seconds, setup_seconds=one.setup_seconds)
        assert one == same


def test_progress_is_reported() -> None:
    model = small("gpt2", 2)
    said: list[tuple[int, int, str]] = []
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0))
    preimage.invert(model, last_alone(vector, 2), max_tests=500, progress=lambda *what: said.append(what))
    tried = [(done, total) for done, total, note in said if note == "prompts tried"]
    assert tried
    assert all(done <= total == 500 for done, total in tried)
