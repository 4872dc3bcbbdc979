"""States that were seen in another way: stored in few bits, permuted, turned, cut, shuffled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import preimage
from preimage.errors import OptionError, StatesError
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.permuted import find_permutation
from preimage.inversion.engine.shuffled import invert_shuffled
from preimage.inversion.engine.verifier import FAR, Target, Verifier
from preimage.inversion.proposers.registry import build_proposer
from preimage.models import LanguageModel
from preimage.observations import Observation
from preimage.states import States, noise_of, undone, view
from support.refusing import refused
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny

PLENTY = 10**7


def verifier_of(model: LanguageModel, layer: int, tolerance: float | None = None, **seen: Any) -> Verifier:
    noise = noise_of(model, layer)[layer]
    return Verifier(model, layer, noise=noise, tolerance=tolerance, observation=Observation(**seen))


def rows_of(model: LanguageModel, ids: list[int], layer: int = 2) -> Tensor:
    return model.states(torch.tensor([ids]), (layer,))[layer][0].clone()


def order_of(width: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randperm(width, generator=torch.Generator().manual_seed(seed)).tolist())


# Stored in few bits.


def per_token(x: Tensor, top: int) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / top
    return (x / scale).round() * scale


def per_channel(x: Tensor, top: int) -> Tensor:
    return per_token(x.T, top).T


def eight_bit_floats(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_read_from_states_in_few_bits(name: str) -> None:
    model, prompts = tiny(name), [random_ids(9, 1), random_ids(5, 2)]
    own = [rows_of(model, ids) for ids in prompts]
    for store in (
        lambda x: per_token(x, 127), lambda x: per_channel(x, 127), eight_bit_floats,
        lambda x: per_token(x, 127).bfloat16().float(),
    ):  # fmt: skip
        for ids, rows in zip(prompts, own, strict=True):
            (found,) = preimage.invert(model, store(rows), 2)
            assert tuple(ids) in (found.alternatives or (found.token_ids,)), found.reason
            assert found.status != "not_recovered"


def test_targets_of_prompts_that_were_stored_differently_stand_side_by_side() -> None:
    model = tiny("llama")
    own = [rows_of(model, random_ids(length, length)) for length in (7, 4, 6)]
    stored = [own[0], per_token(own[1], 127), own[2].bfloat16().float()]
    verifier = verifier_of(model, 2)
    together = verifier.targets(stored)
    assert together.low.shape == together.high.shape == (3, 7, model.d_model)
    for index, (rows, seen) in enumerate(zip(own, stored, strict=True)):
        alone = verifier.target(seen)
        assert torch.equal(alone.low, together.low[index, : len(rows)])
        assert torch.equal(alone.high, together.high[index, : len(rows)])
        assert bool((together[index, : len(rows)].away(rows) <= alone.radius).all())
    exact = verifier.target(own[0])
    assert exact.low is exact.high  # also behind indexing


def test_infinite_cells_are_no_distance() -> None:
    inf = torch.inf
    low, high = torch.tensor([[-inf, 1.0, -inf]]).double(), torch.tensor([[0.0, inf, inf]]).double()
    one = torch.ones(1)
    target = Target(low, high, torch.tensor([[0.5, 1.0, 0.0]]).double(), one, one)
    seen = torch.tensor([[-5.0, 9.0, 3.0], [4.0, 1.0, 0.0], [0.0, -2.0, 1e30]])
    assert target.away(seen).tolist() == [0.0, 2.0, 3.0]


def test_what_is_far_follows_the_width_of_cells() -> None:
    model = tiny("llama")
    rows = rows_of(model, random_ids(6))
    verifier = verifier_of(model, 2)
    exact, fine, coarse = (verifier.target(x).fars for x in (rows, per_token(rows, 127), per_token(rows, 7)))
    reaches = verifier.target(rows).reaches
    assert exact == pytest.approx([FAR * reach for reach in reaches])
    for index in range(6):
        assert exact[index] < fine[index] < coarse[index] / 8
    target = verifier.target(rows)
    cut = Target(
        target.low, target.high.clone().fill_(torch.inf), target.weights, target.radius, target.reach
    )
    assert all(far == torch.inf for far in cut.fars)  # where nothing is known nothing is far


def test_a_named_codec_that_the_numbers_are_not_in_is_refused() -> None:
    model = tiny("llama")
    rows = rows_of(model, random_ids(6))
    refused(StatesError, lambda: verifier_of(model, 2, stored="int8").target(rows))
    assert verifier_of(model, 2, stored="int8").target(per_token(rows, 127)).radius.shape == (6,)
    found = verifier_of(model, 2, stored="float32").target(rows.bfloat16().float())
    assert found.low is found.high


def test_a_tolerance_below_what_storing_changed_is_refused() -> None:
    model = tiny("llama")
    stored = per_token(rows_of(model, random_ids(6)), 7)
    refused(OptionError, lambda: preimage.invert(model, stored, 2, tolerance=1e-3))


# Turned, permuted, cut: known.


def test_known_orders_and_rotations_are_undone() -> None:
    model, ids = tiny("llama"), random_ids(8)
    rows, width = rows_of(model, ids), model.d_model
    kept = order_of(width)
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0]
    for observation in (
        Observation(kept=kept), Observation(rotation=rotation), Observation(kept=kept, rotation=rotation),
    ):  # fmt: skip
        seen = view(observation)(rows)
        plain, left = undone(seen, observation, width)
        assert left.plain
        assert torch.allclose(plain, rows, atol=1e-5)
        (found,) = preimage.invert(model, plain, 2)
        assert (found.status, found.token_ids) == ("recovered", tuple(ids))
    half = view(Observation(kept=kept))(rows).bfloat16()
    assert torch.equal(undone(half, Observation(kept=kept), width)[0], rows.bfloat16())


def test_a_cut_stays_a_view_and_candidates_are_seen_through_it() -> None:
    model, ids = tiny("qwen2"), random_ids(6)
    observation = Observation(kept=(3, 30, 4, 17, 8))
    seen = view(observation)(rows_of(model, ids))
    assert seen.shape == (6, 5)
    assert undone(seen, observation, model.d_model) == (seen, observation)
    verifier = verifier_of(model, 2, kept=observation.kept)
    target = verifier.target(seen)
    away = verifier.whole_sequence(ids, target)
    assert all(one <= radius for one, radius in zip(away, target.radii, strict=True))
    other = [*ids[:-1], (ids[-1] + 1) % VOCABULARY]
    assert verifier.whole_sequence(other, target)[-1] > target.radii[-1]


def test_one_coordinate_in_half_precision_is_no_certificate() -> None:
    """Few numbers fit many tokens: what was tried says nothing of the rest, and the vocabulary decides."""
    model = preimage.models.new_model("gpt2", (32, 2, 4), vocabulary=600, max_length=16, device="cpu")
    several = 0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        token, coordinate = (int(torch.randint(n, (1,), generator=generator)) for n in (600, 32))
        seen = rows_of(model, [token])[:, [coordinate]].bfloat16()
        made = model.states(torch.arange(600)[:, None], (2,))[2][:, 0, [coordinate]].bfloat16()
        fitting = [v for v in range(600) if torch.equal(made[v], seen[0])]
        several += len(fitting) > 1
        (found,) = preimage.invert(model, seen, 2, observe=Observation(kept=(coordinate,)), proposers="prior")
        if len(fitting) > 1:
            assert (found.status, {(v,) for v in fitting} <= set(found.alternatives)) == ("ambiguous", True)
        else:
            assert (found.status, found.token_ids) == ("recovered", (token,))
    assert several  # or nothing was tried


def test_what_is_no_order_and_no_rotation_is_refused() -> None:
    rows = torch.randn(3, 4)
    for kept in ((0, 0, 1, 2), (0, 1, 2, 4), (0, 1, 2, -1), ()):
        refused(OptionError, lambda kept=kept: undone(rows, Observation(kept=kept), 4))
    refused(StatesError, lambda: undone(rows, Observation(kept=(0, 1)), 4))
    for rotation in (
        torch.randn(4, 4),
        torch.eye(4)[:3],
        1.001 * torch.eye(4),
        torch.full((4, 4), torch.nan),
    ):
        refused(OptionError, lambda rotation=rotation: undone(rows, Observation(rotation=rotation), 4))
    refused(StatesError, lambda: undone(rows, Observation(rotation=torch.eye(5)), 4))
    assert torch.equal(undone(rows, Observation(rotation=torch.eye(4)), 4)[0], rows)


# Coordinates in an unknown order.


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_order_is_found_and_undone(name: str, stored: torch.dtype) -> None:
    model = tiny(name)
    prompts = [[1, *random_ids(5, seed)] for seed in range(3)]  # the same first token everywhere
    kept = order_of(model.d_model, 4)
    own = [rows_of(model, ids) for ids in prompts]
    seen = [rows[:, list(kept)].to(stored).float() for rows in own]
    found = find_permutation(
        model, seen, verifier_of(model, 2), build_proposer(model, 2), Budget(PLENTY, None)
    )
    assert sorted(found) == list(range(model.d_model))
    if stored is torch.float32:
        assert found == kept
    for ids, rows in zip(prompts, seen, strict=True):
        plain, left = undone(rows, Observation(kept=found), model.d_model)
        assert left.plain
        (result,) = preimage.invert(model, plain, 2)
        assert (result.status, result.token_ids) == ("recovered", tuple(ids))


def test_single_positions_settle_an_order_together() -> None:
    model = tiny("gpt2")
    kept = order_of(model.d_model, 7)
    seen = [rows_of(model, [token])[:, list(kept)].bfloat16().float() for token in (5, 9, 30, 2, 17)]
    budget = Budget(PLENTY, None)
    found = find_permutation(model, seen, verifier_of(model, 2), build_proposer(model, 2), budget)
    assert found == kept


def test_numbers_of_no_token_have_no_order() -> None:
    model = tiny("llama")
    rows = rows_of(model, random_ids(4)) + 0.1 * torch.randn(4, model.d_model)
    call = (verifier_of(model, 2), build_proposer(model, 2), Budget(PLENTY, None))
    refused(StatesError, lambda: find_permutation(model, [rows], *call))


def test_a_second_position_that_fits_no_token_refutes_the_first() -> None:
    model = tiny("llama")
    rows = rows_of(model, random_ids(4))[:, list(order_of(model.d_model))]
    rows[1] += 0.05 * torch.randn(model.d_model)
    rows[0, 1] = rows[0, 0]  # so that the first position settles nothing by itself
    call = (verifier_of(model, 2), build_proposer(model, 2), Budget(PLENTY, None))
    refused(StatesError, lambda: find_permutation(model, [rows], *call))


# Turned by an unknown rotation.


def turned(rows: Tensor, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows.shape[-1], rows.shape[-1], generator=generator, dtype=torch.float64)
    return (rows.double() @ torch.linalg.qr(drawn)[0]).float()


@pytest.mark.parametrize("layer", [1, 2, "final"])
@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_rotation_is_found_and_undone(name: str, layer: int | str) -> None:
    model, prompts = tiny(name), [random_ids(12, 1), random_ids(1, 4), random_ids(7, 2)]
    states = preimage.capture(model, prompts, layer)
    rows = [turned(states.at(index, states.layers[0])) for index in range(len(prompts))]
    results = preimage.invert(model, rows, layer, observe=Observation(rotated=True))
    assert [(result.status, list(result.token_ids)) for result in results] == [
        ("likely", ids) for ids in prompts
    ]


def test_keys_are_turned_back_too() -> None:
    model, ids = tiny("llama"), random_ids(10)
    keys = preimage.capture(model, [ids], 2, observe="keys").at(0, 2)
    (result,) = preimage.invert(model, turned(keys), 2, observe=Observation("keys", rotated=True))
    assert (result.status, list(result.token_ids)) == ("likely", ids)


def test_no_other_prompt_has_these_lengths_and_angles() -> None:
    model = tiny("gpt2")
    every = torch.cartesian_prod(*[torch.arange(12)] * 4)
    states = model.states(every, (2,))[2].double()
    products = states @ states.mT
    for index in (0, 777, 20000):
        scale = products[index].abs().max()
        near = ((products - products[index]).abs() <= 1e-5 * scale).all(dim=2).all(dim=1)
        assert near.nonzero().flatten().tolist() == [index]
        (result,) = preimage.invert(
            model, turned(states[index].float()), 2, observe=Observation(rotated=True)
        )
        assert (result.status, list(result.token_ids)) == ("likely", every[index].tolist())


def test_states_that_no_rotation_makes_plain_are_refused() -> None:
    model, seen = tiny("llama"), Observation(rotated=True)
    rows = rows_of(model, random_ids(6))
    stretched = turned(rows) * torch.linspace(0.9, 1.1, model.d_model)
    changed = turned(rows)
    changed[3] += 0.05
    for wrong in (stretched, changed, torch.randn(6, model.d_model)):
        error = refused(StatesError, lambda wrong=wrong: preimage.invert(model, wrong, 2, observe=seen))
        assert "lengths and angles" in error.message
    error = refused(StatesError, lambda: preimage.invert(model, turned(rows[:3]), 2, observe=seen))
    assert "too few" in error.message
    error = refused(StatesError, lambda: preimage.invert(model, turned(rows), 2, observe=seen, max_tests=60))
    assert "was not found out: the budget of 60 tests is spent" in error.message


def test_what_does_not_go_with_an_unknown_rotation_is_refused() -> None:
    for other in ({"kept": (0, 1)}, {"permuted": True}, {"positions": "mean"}, {"rotation": torch.eye(2)}):
        refused(OptionError, lambda other=other: Observation(rotated=True, **other))
    model = tiny("llama")
    rows = rows_of(model, random_ids(6))
    for seen in (Observation(rotated=True), Observation(permuted=True)):
        refused(OptionError, lambda seen=seen: preimage.invert(model, rows, 2, observe=seen, prefix=[5]))
    assert Observation.from_dict(Observation(rotated=True).where) == Observation(rotated=True)


# Rows in an unknown order.


def shuffled(model: LanguageModel, rows: Tensor, layer: int, budget: int = PLENTY) -> tuple:
    proposer = build_proposer(model, layer)
    return invert_shuffled(model, rows, verifier_of(model, layer), proposer, Budget(budget, None))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_shuffled_rows_are_put_in_order(name: str, stored: torch.dtype) -> None:
    model = tiny(name)
    for seed in range(3):
        ids = random_ids(9, seed)
        order = order_of(9, seed + 1)
        rows = rows_of(model, ids)[list(order)].to(stored)
        outcome, found = shuffled(model, rows, 2)
        assert [fit.position.token_id for fit in outcome.hypotheses[0]] == ids
        assert tuple(order[row] for row in found) == tuple(range(9))
        assert len(outcome.hypotheses) == 1
        assert not outcome.undecided


def test_rows_without_positions_fit_in_every_order() -> None:
    """At layer 0 of a model with rotary positions a row says its token and nothing of its place."""
    model = tiny("llama")
    ids = [5, 9, 5, 30]
    outcome, order = shuffled(model, rows_of(model, ids, 0), 0)
    prompts = {tuple(fit.position.token_id for fit in fits) for fits in outcome.hypotheses}
    assert len(prompts) == 12  # 4! / 2!: the two fives are one row
    assert all(sorted(prompt) == sorted(ids) for prompt in prompts)
    assert sorted(order) == [0, 1, 2, 3]


def test_every_order_and_prompt_that_fits_is_listed() -> None:
    """A vocabulary with near duplicates; all prompts in all orders are held against the rows."""
    module = build("gpt2")
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table[5] = table[11] * (1 + 1e-7)
    model = preimage.load(module)
    choose = random.Random(0)
    for _ in range(4):
        ids = [choose.choice([5, 11, 3, 20]) for _ in range(3)]
        order = order_of(3, choose.randrange(100))
        outcome, found = shuffled(model, rows_of(model, ids)[list(order)], 2)
        prompts = {tuple(fit.position.token_id for fit in fits) for fits in outcome.hypotheses}
        twins = {tuple(t if t != 11 else 5 for t in prompt) for prompt in prompts}
        assert twins == {tuple(t if t != 11 else 5 for t in ids)}
        assert tuple(order[row] for row in found) == (0, 1, 2)


def test_a_row_that_no_token_makes_is_a_dead_end() -> None:
    model = tiny("llama")
    rows = rows_of(model, random_ids(6))
    rows[3] += 0.1 * torch.randn(model.d_model)
    outcome, order = shuffled(model, rows[[2, 0, 5, 3, 1, 4]], 2)
    assert outcome.hypotheses == ()
    assert outcome.failure is not None
    assert outcome.failure.index == len(order) == 3
    assert not outcome.failure.accepted
    assert "position 3" in outcome.reason


def test_shuffled_rows_that_fit_nothing_are_read_in_any_order() -> None:
    model, ids = tiny("gpt2"), random_ids(6)
    rows = rows_of(model, ids)
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    rows = rows + 0.02 * rows.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(noise, dim=1)
    seen = Observation(positions="shuffled")
    (result,) = preimage.invert(model, rows[[2, 0, 5, 3, 1, 4]], 2, observe=seen)
    assert result.status == "not_recovered"
    assert len(set(result.reading.token_ids) & set(ids)) >= 4
    assert all(sure <= 0.5 for sure in result.reading.confidence)


def test_a_spent_budget_keeps_what_was_found() -> None:
    model = tiny("llama")
    ids = random_ids(8)
    outcome, order = shuffled(model, rows_of(model, ids), 2, budget=40)
    assert outcome.undecided
    assert "Stopped" in outcome.reason
    assert not outcome.hypotheses
    assert tuple(order) == tuple(range(len(order)))
    assert [fit.position.token_id for fit in outcome.partial] == ids[: len(order)]


def test_one_row_and_states_objects() -> None:
    model = tiny("llama")
    rows = States.from_tensor(rows_of(model, [7]), 2).at(0, 2)
    outcome, order = shuffled(model, rows, 2)
    assert order == (0,)
    assert [fit.position.token_id for fit in outcome.hypotheses[0]] == [7]


def test_a_second_token_that_fits_by_chance_is_taken_back() -> None:
    """Two tokens have the same length, and the same angle with the first: what follows tells them apart."""
    module = build("llama")
    embedding = module.get_input_embeddings().weight
    with torch.no_grad():
        first = embedding[3].double() / embedding[3].double().norm()
        along = (embedding[7].double() @ first) * first
        across = embedding[7].double() - along
        other = turned(across[None].float())[0].double()
        other -= (other @ first) * first
        embedding[8] = (along + other * (across.norm() / other.norm())).float()
    model = preimage.load(module)
    for second in (7, 8):
        ids = [3, second, 1, 12, 5, 9]
        rows = turned(rows_of(model, ids, layer=0))
        (result,) = preimage.invert(model, rows, 0, observe=Observation(rotated=True))
        assert (result.status, list(result.token_ids)) == ("likely", ids)


@pytest.mark.parametrize("change", ["rotated", "permuted"])
def test_a_change_that_was_found_out_certifies_nothing(change: str) -> None:
    """The second half of the tokens is the first half, changed: two prompts fit, each by its own change."""
    module = build("llama")
    embedding, half = module.get_input_embeddings().weight, VOCABULARY // 2
    with torch.no_grad():
        own = embedding[:half]
        changed = turned(own) if change == "rotated" else own[:, list(order_of(embedding.shape[1]))]
        embedding[half : 2 * half] = changed
    model = preimage.load(module)
    first, second = [3, 7, 1, 12, 5, 9], [half + token for token in (3, 7, 1, 12, 5, 9)]
    read = set()
    for ids in (first, second):
        rows = rows_of(model, ids, layer=0)
        (result,) = preimage.invert(model, rows, 0, observe=Observation(**{change: True}))
        assert (result.status, result.unique, result.complete) == ("likely", None, False)
        assert "not all tried" in result.reason
        read.add(result.token_ids)
    assert read <= {tuple(first), tuple(second)}


def test_what_was_found_out_is_no_ground_for_a_proof() -> None:
    model = tiny("llama")
    rows = turned(rows_of(model, random_ids(6)))
    for change in ({"rotated": True}, {"permuted": True}):
        seen = Observation(**change)
        for wrong in ({"prove": True}, {"prefix": [1, 2]}):
            refused(
                OptionError,
                lambda seen=seen, wrong=wrong: preimage.invert(model, rows, 2, observe=seen, **wrong),
            )
