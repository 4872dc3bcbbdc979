"""Exact recovery, and honest failure, on tiny models of every architecture."""

import dataclasses

import pytest
import torch

import preimage
from preimage.errors import LayerError, OptionError, RunFolderError, StatesError
from preimage.inversion.engine.search import MAX_PROMPTS
from preimage.states import States
from support.tiny import NAMES, VOCABULARY, build, random_ids, tiny

METHODS = ("fast", "sipit", "brute-force")


@pytest.mark.parametrize("length", [1, 2, 17, 64])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_exact_ids_at_every_layer(name: str, method: str, length: int) -> None:  # I1
    model, ids = tiny(name), random_ids(length, seed=length)
    states = preimage.capture(model, [ids])
    for layer in states.layers:
        (found,) = preimage.invert(model, states, layer, method=method)
        assert found.status == "recovered", (layer, found.reason)
        assert found.token_ids == tuple(ids), layer
        assert found.tests <= length * VOCABULARY  # I4
        assert len(found.positions) == length
        assert all(position.distance <= position.radius for position in found.positions)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize(
    "ids",
    [[7] * 9, [7, 3] * 5, [1, 5, 9], [5, 9, 1, 2, 0], [0], [1], [VOCABULARY - 1]],
    ids=["repeated", "alternating", "bos", "special", "pad", "only-bos", "last-id"],
)
def test_repeated_special_and_single_tokens(name: str, method: str, ids: list[int]) -> None:  # I2
    model = tiny(name)
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2), method=method)
    assert (found.status, found.token_ids) == ("recovered", tuple(ids))


@pytest.mark.parametrize("method", METHODS[1:])
def test_published_cost_changes_the_cost_alone(method: str) -> None:
    model, ids = tiny("llama"), random_ids(6)
    states = preimage.capture(model, [ids], layers=1)
    (cached,) = preimage.invert(model, states, method=method)
    (published,) = preimage.invert(model, states, method=method, published_cost=True)
    assert cached.token_ids == published.token_ids == tuple(ids)
    assert published.forward_tokens > cached.forward_tokens


def test_lookahead_does_not_change_what_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    from preimage.inversion.engine import policies

    model = tiny("qwen2")
    ids = torch.tensor(random_ids(4))
    observed = model.states(ids[None], (2,))[2][0].clone()

    def proposals(lookahead: int) -> list[int]:
        monkeypatch.setattr(policies, "_LOOKAHEAD", lookahead)
        prefix = model.prefix(2)
        prefix.extend(ids[:3])
        policy = policies.GradientPolicy(
            model,
            prefix,
            observed[3],
            lambda states: states,
            preimage.InvertOptions(snap_every=7),
            torch.Generator().manual_seed(3),
        )
        untested = torch.ones(VOCABULARY, dtype=torch.bool)
        order: list[int] = []
        while untested.any():
            batch = policy.propose(untested)
            assert untested[batch].all()
            untested[batch] = False
            order += batch.tolist()
        return order

    one_by_one = proposals(1)
    assert sorted(one_by_one) == list(range(VOCABULARY))
    assert proposals(8) == one_by_one


def _states(name: str, layer: int, length: int = 6) -> tuple[States, list[int]]:
    ids = random_ids(length)
    return preimage.capture(tiny(name), [ids], layers=layer), ids


@pytest.mark.parametrize("method", METHODS)
def test_wrong_model_is_not_recovered(method: str) -> None:  # I3
    states, _ = _states("llama", 2)
    (found,) = preimage.invert(tiny("llama", seed=1), states, method=method)
    assert found.status == "not_recovered"
    assert found.failed_position == 0
    assert found.failed_distance is not None
    assert found.failed_distance > found.positions[0].radius
    assert "position 0" in found.reason
    assert found.tests <= 9 * VOCABULARY * states.lengths[0]  # the cost of finding out, and of a reading


@pytest.mark.parametrize("method", METHODS)
def test_wrong_layer_is_not_recovered(method: str) -> None:  # I3
    states, _ = _states("llama", 2)
    moved = States.from_tensor(states.at(0, 2), 3)
    (found,) = preimage.invert(tiny("llama"), moved, 3, method=method)
    assert (found.status, found.failed_position) == ("not_recovered", 0)


@pytest.mark.parametrize("method", METHODS)
def test_noise_above_the_margin_is_not_recovered(method: str) -> None:  # I3
    states, ids = _states("llama", 2)
    noisy = states.at(0, 2).clone()
    noisy[4] += 0.2 * noisy[4].norm() * torch.nn.functional.normalize(torch.randn(noisy.shape[1]), dim=0)
    (found,) = preimage.invert(tiny("llama"), noisy, 2, method=method)
    assert (found.status, found.failed_position) == ("not_recovered", 4)
    assert found.token_ids == tuple(ids[:4])  # the verified part is kept


@pytest.mark.parametrize("method", METHODS)
def test_shuffled_and_truncated_states_are_not_recovered(method: str) -> None:  # I3
    states, ids = _states("llama", 2)
    whole = states.at(0, 2)
    (shuffled,) = preimage.invert(tiny("llama"), whole.flip(0), 2, method=method)
    assert shuffled.status == "not_recovered"
    (headless,) = preimage.invert(tiny("llama"), whole[2:], 2, method=method)
    assert headless.status == "not_recovered"
    (front,) = preimage.invert(tiny("llama"), whole[:4], 2, method=method)
    assert (front.status, front.token_ids) == ("recovered", tuple(ids[:4]))  # a prefix is a prompt


def test_budgets_keep_the_verified_part() -> None:  # I4
    states, ids = _states("llama", 2, length=20)
    model = tiny("llama")
    (full,) = preimage.invert(model, states, method="brute-force")
    limit = sum(position.tests for position in full.positions[:10])
    (cut,) = preimage.invert(model, states, method="brute-force", max_tests=limit)
    assert cut.status == "not_recovered"
    assert cut.tests <= limit
    assert cut.token_ids == tuple(ids[: len(cut.token_ids)])
    assert len(cut.token_ids) >= 9
    assert f"budget of {limit} tests" in cut.reason
    for method in METHODS:
        (late,) = preimage.invert(model, states, method=method, timeout=1e-6)
        assert late.status == "not_recovered"
        assert "time limit" in late.reason


@pytest.mark.parametrize("method", METHODS)
def test_twin_embeddings_are_ambiguous_and_all_listed(method: str) -> None:  # I5
    module = build("llama")
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table[11] = table[5]
        table[40] = table[5]
        table[30] = table[31]
    model = preimage.load(module)
    ids = [8, 5, 31, 9, 40]
    states = preimage.capture(model, [ids, [8, 9, 10]], layers=2)
    twin, plain = preimage.invert(model, states, method=method)
    expected = {(8, a, b, 9, c) for a in (5, 11, 40) for b in (30, 31) for c in (5, 11, 40)}
    assert twin.status == "ambiguous"
    assert (twin.fitting, set(twin.alternatives)) == (18, expected)
    assert (plain.status, plain.token_ids, plain.alternatives) == ("recovered", (8, 9, 10), ())


def test_many_twins_are_counted_beyond_what_is_listed() -> None:  # I5
    module = build("gpt2")
    with torch.no_grad():
        module.get_input_embeddings().weight[20:40] = 0.25
    model = preimage.load(module)
    (found,) = preimage.invert(model, preimage.capture(model, [[21, 22, 3]], layers=1))
    assert (found.status, found.fitting) == ("ambiguous", 400)
    assert len(found.alternatives) == MAX_PROMPTS


@pytest.mark.parametrize("method", METHODS)
def test_near_twins_within_the_noise_are_ambiguous(method: str) -> None:  # I5
    module = build("llama")
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        table[11] = table[5] * (1 + 1e-7)
        table[11, 0] += 1e-9
    model = preimage.load(module)
    ids = [8, 5, 9]
    (found,) = preimage.invert(model, preimage.capture(model, [ids], layers=2), method=method)
    assert found.status == "ambiguous"
    assert set(found.alternatives) == {(8, 5, 9), (8, 11, 9)}


def test_constant_prompts_without_bos_are_ambiguous_from_the_last_state() -> None:  # I5
    model = tiny("llama")  # rotary positions
    states = preimage.capture(model, [[7, 7, 7]], layers=2, positions="last")
    (found,) = preimage.invert(model, states)
    assert found.status == "ambiguous"
    assert found.alternatives == tuple((7,) * n for n in range(1, 9))
    (whole,) = preimage.invert(model, preimage.capture(model, [[7, 7, 7]], layers=2))
    assert (whole.status, whole.token_ids) == ("recovered", (7, 7, 7))  # three states, three tokens


def test_last_state_with_absolute_positions_is_not_ambiguous() -> None:
    model = tiny("gpt2")  # learned positions tell 7 from 7 7
    states = preimage.capture(model, [[7], [7, 7, 7]], layers=2, positions="last")
    one, three = preimage.invert(model, states)
    assert (one.status, one.token_ids) == ("recovered", (7,))
    assert (three.status, three.token_ids, three.unique) == ("recovered", (7, 7, 7), "tested")
    assert "nothing is proved" in three.uniqueness


def test_wrong_branches_are_backed_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tolerance so wide that wrong tokens fit at first: later positions and the whole decide."""
    model, ids = tiny("llama"), random_ids(8)
    states = preimage.capture(model, [ids], layers=2)
    (found,) = preimage.invert(model, states, tolerance=0.6, method="brute-force")
    assert found.status in ("recovered", "ambiguous")
    fitting = found.alternatives or (found.token_ids,)
    assert tuple(ids) in fitting
    for prompt in fitting:  # everything listed does fit
        again = model.states(torch.tensor([prompt]), (2,))[2][0]
        gap = (again - states.at(0, 2)).double().norm(dim=-1)
        assert bool((gap <= 0.6 * states.at(0, 2).double().norm(dim=-1)).all())


def test_a_step_noisier_than_the_floor_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from preimage.inversion.engine.verifier import Target, Verifier

    model, ids = tiny("llama"), random_ids(5)
    states = preimage.capture(model, [ids], layers=2)
    honest = Verifier.distances

    def shifted(self: Verifier, prefix: object, tokens: torch.Tensor, target: Target) -> torch.Tensor:
        return honest(self, prefix, tokens, target) + 4 * float(target.radius)

    monkeypatch.setattr(Verifier, "distances", shifted)
    (found,) = preimage.invert(model, states, method="sipit")
    assert (found.status, found.token_ids) == ("recovered", tuple(ids))


def test_bfloat16_copies_are_inverted() -> None:
    model, ids = tiny("llama"), random_ids(12)
    states = preimage.capture(model, [ids], layers=2)
    (found,) = preimage.invert(model, states.at(0, 2).to(torch.bfloat16), 2)
    assert tuple(ids) in (found.alternatives or (found.token_ids,))
    assert found.status != "not_recovered"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_in_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, ids = preimage.load(build(name, dtype=dtype)), random_ids(9)
    states = preimage.capture(model, [ids], layers=[2, "final"])
    for layer in states.layers:
        (found,) = preimage.invert(model, states, layer)
        assert tuple(ids) in (found.alternatives or (found.token_ids,))
        assert found.status != "not_recovered"


def test_same_seed_same_result() -> None:
    states, _ = _states("mixtral", 3)
    model = tiny("mixtral")

    def run() -> object:
        (found,) = preimage.invert(model, states, seed=5)
        return dataclasses.replace(found, seconds=0.0, setup_seconds=0.0)

    assert run() == run()


def test_results_go_to_json_and_back(tmp_path: object) -> None:
    import json
    from pathlib import Path

    from preimage.inversion.result import Inversion

    states, _ = _states("llama", 1)
    (found,) = preimage.invert(tiny("llama"), states)
    path = found.save(Path(str(tmp_path)) / "found.json")
    saved = json.loads(path.read_text())
    assert Inversion.load(path) == found
    damaged = [{"kind": "geometry"}, {"schema": "other"}, {"token_ids": 3}, {"status": "perhaps"}]
    less = {name: value for name, value in saved.items() if name != "status"}
    for wrong in (*(saved | one for one in damaged), less):
        path.write_text(json.dumps(wrong))
        with pytest.raises(RunFolderError, match="is not a saved inversion"):
            Inversion.load(path)
    assert (saved.pop("schema"), saved.pop("kind")) == ("preimage/9", "inversion")
    assert Inversion.from_dict(saved) == found
    assert "recovered" in found._repr_html_()


def test_run_folder_keeps_finished_prompts(tmp_path: object) -> None:
    model = tiny("llama")
    states = preimage.capture(model, [random_ids(5, s) for s in range(4)], layers=2)
    fresh = preimage.invert(model, states)

    def stop(done: int, total: int, note: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preimage.invert(model, states, out=f"{tmp_path}/run", progress=stop)
    before = model.forward_tokens
    again = preimage.invert(model, states, out=f"{tmp_path}/run")
    assert model.forward_tokens - before == sum(found.forward_tokens for found in again[2:])
    assert [found.token_ids for found in again] == [found.token_ids for found in fresh]


@pytest.mark.parametrize(
    "options",
    [
        {"published_cost": True},
        {"method": "magic"},
        {"tolerance": 0.0},
        {"max_tests": 0},
        {"timeout": -1.0},
        {"patience": -1},
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    states, _ = _states("llama", 1)
    with pytest.raises(OptionError):
        preimage.invert(tiny("llama"), states, **options)


def test_tolerance_below_the_noise_floor_is_refused() -> None:  # N11
    states, _ = _states("llama", 1)
    with pytest.raises(OptionError, match="noise floor"):
        preimage.invert(tiny("llama"), states, tolerance=1e-12)


def test_layer_must_be_there() -> None:
    states, _ = _states("llama", 1)
    with pytest.raises(LayerError, match="was not captured"):
        preimage.invert(tiny("llama"), states, 2)
    with pytest.raises(LayerError, match="no layer"):
        preimage.invert(tiny("llama"), states, 9)
    with pytest.raises(LayerError, match="does not say its layer"):
        preimage.invert(tiny("llama"), states.at(0, 1))


def test_nan_is_refused_before_any_work() -> None:
    states, _ = _states("llama", 1)
    broken = states.at(0, 1).clone()
    broken[3, 0] = float("nan")
    with pytest.raises(StatesError, match="position 3"):
        preimage.invert(tiny("llama"), broken, 1)


def test_the_noise_floor_takes_layers_as_capture_does() -> None:
    model = tiny("llama")
    every = preimage.noise_floor(model, "all")
    assert list(every) == [0, 1, 2, 3, "final"]
    for layers, expected in ((2, [2]), ("1,final", [1, "final"]), ([3, 0], [0, 3])):
        assert preimage.noise_floor(model, layers) == {layer: every[layer] for layer in expected}
    with pytest.raises(LayerError, match="no layer 9"):
        preimage.noise_floor(model, 9)
