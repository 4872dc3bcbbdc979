"""Attacks on inversion: states and models made so that a wrong answer looks right."""

import json

import pytest
import torch

import preimage
import preimage.inversion.engine.jobs
import preimage.inversion.engine.lookalikes
from preimage.inversion.engine import verifier as verifier_module
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, gather
from preimage.states import States, noise_of
from preimage.states.observation import rounding_cell, stored_type
from support.bundles import manifest_of
from support.tiny import NAMES, VOCABULARY, build, opt_with_projection, random_ids, tiny

METHODS = ("fast", "sipit", "brute-force")


def near_rows(*pairs: tuple[int, int], distance: float, name: str = "llama") -> LanguageModel:
    """A tiny model in which some tokens' embeddings lie a relative distance from others'."""
    module = build(name)
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        for copy, original in pairs:
            noise = torch.nn.functional.normalize(torch.randn(table.shape[1]), dim=0)
            table[copy] = table[original] + distance * table[original].norm() * noise
    return preimage.load(module)


# What may fit is followed to the end.


@pytest.mark.parametrize("method", METHODS)
def test_rivals_at_many_positions_are_not_dropped(method: str) -> None:
    model = near_rows((5, 11), (21, 20), distance=1e-7)
    ids = (11, *[20] * 7)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2), method=method)
    assert found.status == "ambiguous"
    assert {prompt[0] for prompt in found.alternatives} == {5, 11}
    assert (len(found.alternatives), found.complete) == (64, False)  # of 256 that fit
    assert found.reason


@pytest.mark.parametrize("method", METHODS)
def test_several_tokens_within_a_wide_tolerance_are_all_listed(method: str) -> None:
    model = near_rows((5, 11), (17, 11), (21, 20), distance=0.02)
    states = preimage.capture(model, [(11, 20)], layers=2)
    (found,) = preimage.invert(model, states, tolerance=0.1, method=method)
    assert found.status == "ambiguous"
    assert {(a, b) for a in (5, 11, 17) for b in (20, 21)} <= set(found.alternatives)


def test_a_projection_behind_the_embedding_hides_no_twin() -> None:
    module = opt_with_projection()
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        projection = module.model.decoder.project_in.weight
        projection[:, -1] = 0.0  # one direction of the table is lost behind it
        table[11] = table[5]
        table[11, -1] += 3.0
    model = preimage.load(module)
    (found,) = preimage.invert(model, preimage.capture(model, [[8, 5, 9]], layers=2))
    assert (found.status, set(found.alternatives)) == ("ambiguous", {(8, 5, 9), (8, 11, 9)})


# A tolerance that is not far below the spacing of tokens proves nothing.


def test_a_common_offset_does_not_widen_what_is_accepted() -> None:
    """All states 1e5 long because of one constant coordinate: the vocabulary's mean is no token's state."""
    module = build("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[:, 3] += 1e5
    model = preimage.load(module)
    ids = random_ids(5)
    own = model.states(torch.tensor([ids]), (2,))[2][0].clone()
    (honest,) = preimage.invert(model, own.clone(), 2)
    assert honest.status != "not_recovered"
    assert tuple(ids) in (honest.alternatives or (honest.token_ids,))
    every = torch.tensor([[*ids[:-1], token] for token in range(VOCABULARY)])
    own[-1] = model.states(every, (2,))[2][:, -1].mean(0)
    (found,) = preimage.invert(model, own, 2)
    assert found.status != "recovered"


@pytest.mark.parametrize("layer", [1, 3, "final"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_copies_are_read_exactly_and_nothing_else_is(name: str, layer: int | str) -> None:
    model, ids = tiny(name), random_ids(6)
    own = model.states(torch.tensor([ids]), (layer,))[layer][0]
    for half in (torch.bfloat16, torch.float16):
        for stored in (own.to(half), own.to(half).float()):  # as numpy has it: rounded, in float32
            (found,) = preimage.invert(model, stored.clone(), layer)
            assert (found.status, found.token_ids) == ("recovered", tuple(ids))
        mixed = own.clone()
        others = model.states(torch.tensor([[*ids[:-1], 7], [*ids[:-1], 30]]), (layer,))[layer][:, -1]
        mixed[-1] = others.mean(0)
        (found,) = preimage.invert(model, mixed.to(half), layer)
        assert found.status == "not_recovered"


def test_sinks_of_the_default_model_in_half_precision(smollm2: LanguageModel) -> None:
    """Layer 15, first position: states 20,000 long, tokens 60 to 80 apart, rounding up to 90."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(smollm2.vocab_size, (4, 8), generator=generator)
    states = smollm2.states(tokens.flatten()[:, None], (14, 15))
    below, at = (states[layer].view(4, 8, -1) for layer in (14, 15))
    some = {"max_tests": 1024}  # of the likeliest: those that were once accepted are among them
    for row in range(4):
        for fake in (at[row].mean(0), at[row, :2].mean(0), below[row, 0]):
            (found,) = preimage.invert(smollm2, fake[None].to(torch.bfloat16), 15, **some)
            assert found.status == "not_recovered"
        (honest,) = preimage.invert(smollm2, at[row, :1].to(torch.bfloat16), 15)
        assert (honest.status, honest.token_ids) == ("recovered", (int(tokens[row, 0]),))
        assert honest.unique == "tested"


def test_rounding_cells_hold_what_is_rounded_to_them() -> None:
    for half in (torch.bfloat16, torch.float16, torch.float32):
        exact = torch.randn(4000, dtype=torch.float64) * 10.0 ** torch.randint(-6, 5, (4000,))
        exact = torch.cat([exact, torch.tensor([0.0, -0.0, 1.0, -2.0], dtype=torch.float64)])
        stored = exact.to(half)
        exact, stored = exact[torch.isfinite(stored)], stored[torch.isfinite(stored)]
        low, high = rounding_cell(stored)
        assert bool(((low <= exact) & (exact <= high)).all())
        inside, outside = (high - low) * 1e-3, -(high - low) * 1e-3
        for edge, sign in ((low, 1), (high, -1)):
            assert bool(((edge + sign * inside).to(half) == stored).all())
            assert bool(((edge + sign * outside).to(half) != stored).all())
        assert stored_type(stored.float()) == half


# The last position alone.


def test_every_token_that_fits_the_last_state_is_listed() -> None:
    model = near_rows((5, 11), distance=1e-7, name="gpt2")
    states = preimage.capture(model, [[5]], layers=2, positions="last")
    (found,) = preimage.invert(model, states)
    assert found.status == "ambiguous"
    assert {(5,), (11,)} <= set(found.alternatives)


def test_a_scan_that_a_budget_ended_recovers_nothing() -> None:
    model = tiny("gpt2")
    states = preimage.capture(model, [[3]], layers=2, positions="last")
    (found,) = preimage.invert(model, states, max_tests=10)
    assert (found.status, found.complete) == ("ambiguous", False)
    assert "10 of 41 tokens" in found.reason
    (whole,) = preimage.invert(model, states)
    assert (whole.status, whole.token_ids, whole.unique) == ("recovered", (3,), "tested")
    assert "longer prompts cannot be" in whole.uniqueness


def test_a_wide_tolerance_recovers_nothing_from_the_last_state() -> None:
    model = tiny("gpt2")
    states = preimage.capture(model, [[3, 8]], layers=2, positions="last")
    for tolerance in (0.1, 0.5, 1.0):
        (found,) = preimage.invert(model, states, tolerance=tolerance)
        assert found.status != "recovered"


def test_equal_position_rows_are_found_from_the_last_state() -> None:
    module = build("gpt2")
    with torch.no_grad():
        module.transformer.wpe.weight[20] = module.transformer.wpe.weight[0]
    model = preimage.load(module)
    (found,) = preimage.invert(model, preimage.capture(model, [[3]], layers=0, positions="last"))
    assert found.status == "ambiguous"
    assert (3,) * 21 in found.alternatives


# Proofs, budgets and what came with the states.


def test_a_proof_demotes_what_it_refutes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = near_rows((5, 11), distance=0.05)
    states = preimage.capture(model, [[8, 11, 9]], layers=2)
    monkeypatch.setattr(verifier_module, "FAR", 0.0)  # an engine that is content with too little
    monkeypatch.setattr(preimage.inversion.engine.lookalikes, "NEAR", 0.0)
    monkeypatch.setattr(preimage.inversion.engine.lookalikes, "_NEAREST", 0)
    (fooled,) = preimage.invert(model, states, tolerance=0.2)
    assert (fooled.status, fooled.unique) == ("recovered", "tested")
    (proved,) = preimage.invert(model, states, tolerance=0.2, prove=True)
    assert proved.status == "ambiguous"
    assert {(8, 11, 9), (8, 5, 9)} <= set(proved.alternatives)
    assert (proved.unique, proved.uniqueness) == (None, "")


def test_a_proof_says_so() -> None:
    model, ids = tiny("qwen2"), random_ids(4)
    states = preimage.capture(model, [ids], layers=2)
    (tested,) = preimage.invert(model, states)
    (proved,) = preimage.invert(model, states, prove=True)
    assert (tested.unique, proved.unique) == ("tested", "proved")
    assert "41" in proved.uniqueness
    assert tested.complete
    assert proved.setup_seconds >= 0


def test_a_budget_that_ends_before_rivals_are_tried_is_said() -> None:
    model, ids = tiny("llama"), random_ids(6)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2), max_tests=6)
    assert (found.status, found.token_ids, found.complete) == ("ambiguous", tuple(ids), False)
    assert "how far apart" in found.reason


def test_the_manifest_is_no_source_of_tolerance(tmp_path: object) -> None:
    bundle = preimage.capture(tiny("llama"), [random_ids(4)], layers=2).save(f"{tmp_path}/b")
    manifest = manifest_of(bundle)
    manifest["noise_floor"] = {"2": 0.9}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (found,) = preimage.invert(tiny("llama", seed=1), preimage.open_states(bundle))
    assert found.status == "not_recovered"


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_windows_shorter_than_the_prompt_are_measured_position_by_position(name: str) -> None:
    """A mask of our own hides a model's window; that shows, and other passes are run instead."""
    model, ids = tiny(name), random_ids(20)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2))
    assert (found.status, found.token_ids) == ("recovered", tuple(ids))
    prefix = model.prefix(2)
    for position in found.positions:
        state = prefix.try_tokens(torch.tensor([position.runner_up_id]))[0]
        observed = preimage.capture(model, [ids], layers=2).at(0, 2)[position.index]
        away = float((state - observed).double().norm())
        assert position.runner_up_distance == pytest.approx(away, rel=0.5)
        prefix.extend(torch.tensor([position.token_id]))


@pytest.mark.parametrize("name", NAMES)
def test_branches_are_tokens_tried_where_they_stand(name: str) -> None:
    from preimage.models import states_of_branches

    model, ids = tiny(name), torch.tensor(random_ids(4))
    prefix = model.prefix(2)
    prefix.extend(ids)
    places, tokens = torch.tensor([0, 1, 2, 3, 3, 1]), torch.tensor([5, 6, 7, 8, 9, 40])
    found = prefix.try_at(places, tokens)
    (trunk,), (together,) = states_of_branches(model, 2, ids[None], places[None], tokens[None])
    growing = model.prefix(2)
    growing.extend(ids[:1])
    rest, beside = growing.extend_and_try(ids[1:], places, tokens)
    plain = model.states(ids[None], (2,))[2][0]
    limits = 16 * noise_of(model, (2,))[2].relative * plain.norm(dim=1)
    assert bool(((trunk - plain).norm(dim=1) <= limits).all())
    assert bool(((rest - plain[1:]).norm(dim=1) <= limits[1:]).all())
    follow = torch.tensor([11])
    assert (len(prefix), len(growing)) == (4, 4)
    assert torch.allclose(growing.try_tokens(follow), prefix.try_tokens(follow), rtol=1e-4, atol=1e-5)
    for place, token, *states in zip(places, tokens, found, together, beside, strict=True):
        alone = model.states(torch.cat([ids[:place], token[None]])[None], (2,))[2][0, -1]
        allowed = 16 * noise_of(model, (2,))[2].relative * float(alone.norm())
        assert all(float((state - alone).norm()) <= allowed for state in states)


@pytest.mark.parametrize("through_data", [False, True])
def test_what_was_known_of_a_model_before_it_was_changed_is_void(through_data: bool) -> None:
    model = preimage.load(build("llama"))
    before = model.identity.weight_hash
    (found,) = preimage.invert(model, preimage.capture(model, [[8, 11, 9]], layers=2))
    assert found.status == "recovered"
    table = model.module.get_input_embeddings().weight
    with torch.no_grad():
        (table.data if through_data else table)[5] = table[11]
    (found,) = preimage.invert(model, preimage.capture(model, [[8, 11, 9]], layers=2))
    assert (found.status, set(found.alternatives)) == ("ambiguous", {(8, 11, 9), (8, 5, 9)})
    assert torch.equal(model.embedding_table[5], model.embedding_table[11])
    assert model.identity.weight_hash != before


def test_noise_is_measured_anew_where_a_hook_was_added() -> None:
    model = preimage.load(build("llama"))
    edition, before = model.edition, noise_of(model, (2,))
    assert noise_of(model, (2,)) == before
    hook = lambda _module, _args, output: output * 8.0  # noqa: E731
    model.module.model.layers[1].register_forward_hook(hook)
    assert model.edition > edition
    assert noise_of(model, (2,))[2].longest > 4 * before[2].longest


def test_users_hooks_are_part_of_the_model() -> None:
    module = build("llama")
    module.model.layers[0].register_forward_hook(lambda _module, _args, output: output * 1.5)
    model, ids = preimage.load(module), random_ids(7)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2))
    assert (found.status, found.token_ids) == ("recovered", tuple(ids))


def test_a_row_of_zeros_is_a_token_like_any_other() -> None:
    module = build("llama")
    with torch.no_grad():
        module.get_input_embeddings().weight[4] = 0.0
    model = preimage.load(module)
    (found,) = preimage.invert(model, preimage.capture(model, [[4, 4, 7]], layers=1))
    expected = {(a, b, 7) for a in (0, 4) for b in (0, 4)}  # padding is a row of zeros too
    assert (found.status, set(found.alternatives), found.complete) == ("ambiguous", expected, True)


def test_a_margin_is_known_at_every_position_of_the_default_model(smollm2: LanguageModel) -> None:
    (ids,) = gather("default:code", smollm2, PromptOptions(count=1, length=12))
    states = States.from_tensor(preimage.capture(smollm2, [ids], 15).at(0, 15), 15)
    (found,) = preimage.invert(smollm2, states)
    assert tuple(ids) in (found.alternatives or (found.token_ids,))
    assert found.margin is not None
    assert found.margin > 128 * max(position.radius for position in found.positions)
