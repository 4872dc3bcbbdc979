"""Many prompts in shared passes: the same answers whatever a pass holds, and whatever its shape does."""

import gc
import math

import pytest
import torch
from torch import Tensor

import preimage
from preimage import States
from preimage.devices import Aside, send
from preimage.errors import StatesError
from preimage.inversion.engine import shared_pass, together, verifier
from preimage.inversion.engine.together import uninterrupted
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.scores import Keys, Part, Scores
from preimage.inversion.result import VerifiedPositions
from preimage.models import LanguageModel, prefix, states_of_branches
from preimage.states import noise_of
from support.planted import VOCABULARY, Planted, ids_of, run, states_of
from support.tiny import build, random_ids

LENGTHS = (24, 9, 24, 1, 17, 24, 3)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return preimage.load(build("llama", vocab_size=VOCABULARY, max_position_embeddings=1024))


def planted(seed: int = 0) -> list[list[int]]:
    return [random_ids(length, seed + at, VOCABULARY) for at, length in enumerate(LENGTHS)]


def test_branches_are_the_same_in_one_pass_and_behind_a_plain_one(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([random_ids(12, seed, VOCABULARY) for seed in range(3)])
    places, tokens = torch.tensor([[0, 5, 11, 5]] * 3), torch.randint(0, VOCABULARY, (3, 4))
    at_once = states_of_branches(model, 2, ids, places, tokens)
    monkeypatch.setattr(prefix, "FEW_TOKENS", 0)
    trunk, branches = states_of_branches(model, 2, ids, places, tokens)
    assert bool((trunk == model.states(ids, (2,))[2]).all())  # to the bit: a plain pass it is
    for both, alone in zip(at_once, (trunk, branches), strict=True):
        torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)
    rows = torch.tensor([2, 0, 0])  # two rows of branches of one prompt, none of another
    _, chosen = states_of_branches(model, 2, ids, places, tokens[rows], rows)
    torch.testing.assert_close(chosen, branches[rows], rtol=1e-4, atol=1e-5)
    for row, (at, token) in enumerate(zip(places[0].tolist(), tokens[0].tolist(), strict=True)):
        whole = torch.cat([ids[0, :at], torch.tensor([token])])
        plain = model.states(whole[None], (2,))[2][0, -1]
        torch.testing.assert_close(branches[0, row], plain, rtol=1e-4, atol=1e-5)


def test_branches_off_nothing_and_none_at_all(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for few in (0, prefix.FEW_TOKENS):
        monkeypatch.setattr(prefix, "FEW_TOKENS", few)
        tokens = torch.tensor([[7, 9]])
        trunk, first = states_of_branches(model, 2, tokens[:, :0], torch.zeros_like(tokens), tokens)
        assert trunk.shape == (1, 0, model.d_model)
        plain = model.states(torch.tensor([[7], [9]]), (2,))[2][:, 0]
        torch.testing.assert_close(first[0], plain, rtol=1e-4, atol=1e-5)
        trunk, none = states_of_branches(model, 2, tokens, tokens[:, :0], tokens[:, :0])
        assert trunk.shape == (1, 2, model.d_model)
        assert none.shape == (1, 0, model.d_model)


@pytest.mark.parametrize(
    ("batch_tokens", "few_tokens", "width", "hurried"),
    [(16384, 4096, 32, 0), (48, 0, 2, 0), (48, 4096, 5, 32), (16384, 0, 3, 32)],
)
def test_answers_do_not_depend_on_what_shares_a_pass(
    model: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    batch_tokens: int,
    few_tokens: int,
    width: int,
    hurried: int,
) -> None:
    """Passes of one prompt or of all, in one go or in two, branches in short rows or long ones."""
    monkeypatch.setattr(together, "_BATCH_TOKENS", batch_tokens)
    monkeypatch.setattr(prefix, "FEW_TOKENS", few_tokens)
    monkeypatch.setattr(shared_pass, "FEW_TOKENS", few_tokens)
    monkeypatch.setattr(shared_pass, "_WIDTH", width)
    monkeypatch.setitem(together._HURRIED, "cpu", hurried)
    prompts = planted()
    states = states_of(model, prompts)
    for ranks in ({}, {2: 5, 7: 40, 8: 3}, {0: 20, 16: 300}):
        found, _ = run(model, Planted(prompts, ranks), states, True)
        assert [ids_of(one) for one in found] == prompts
        assert all(len(one.hypotheses) == 1 for one in found)
    moved = states[0].clone()
    away = torch.randn(moved.shape[1], generator=torch.Generator().manual_seed(0))
    moved[6] += 0.05 * moved[6].norm() * away
    found, _ = run(model, Planted(prompts, {2: 5}), [moved, *states[1:]], True)
    assert not found[0].hypotheses
    assert [ids_of(one) for one in found[1:]] == prompts[1:]


def test_what_is_told_early_is_what_comes_out(model: LanguageModel) -> None:
    from preimage.inversion.engine.budget import Budget
    from preimage.inversion.engine.fast import FastInverter

    prompts = planted(50)
    checker = Verifier(model, 2, noise=noise_of(model, (2,))[2])
    early: dict[int, object] = {}
    engine = FastInverter(model, checker, Planted(prompts, {4: 9}), together=True)
    budgets = [Budget(len(ids) * VOCABULARY, None) for ids in prompts]
    found = engine.run(states_of(model, prompts), budgets, ended=early.__setitem__)
    assert early
    assert all(found[index] is outcome for index, outcome in early.items())


@pytest.mark.parametrize("for_good", [False, True])
def test_a_sink_that_another_shape_moves_stays_verified_until_a_whole_pass(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    """Position 0 fits in the first pass and no more in later ones; the last word is a large batch's."""
    prompts = [random_ids(24, seed, VOCABULARY) for seed in range(3)]
    states = states_of(model, prompts)
    off = 5 * Verifier(model, 2, noise=noise_of(model, (2,))[2]).target(states[0]).radii[0] / 4
    original, passes, whole = shared_pass.states_of_branches, [], []

    def moved(*given: object) -> tuple[Tensor, Tensor]:
        trunk, others = original(*given)  # type: ignore[arg-type]
        trunk = trunk.clone()
        trunk[:, 0] += off * bool(passes)
        passes.append(len(trunk))
        return trunk, others

    in_large_batch = Verifier.states_in_large_batch

    def counted(self: Verifier, rows: Tensor) -> Tensor:
        found = in_large_batch(self, rows).clone()
        whole.append(len(rows))
        if for_good:
            found[:, 0] += off
        return found

    monkeypatch.setitem(verifier.LARGE, "cpu", 64)
    monkeypatch.setattr(shared_pass, "states_of_branches", moved)
    monkeypatch.setattr(Verifier, "states_in_large_batch", counted)
    found, _ = run(model, Planted(prompts, {5: 12, 15: 40}), states, True)
    assert [ids_of(one) for one in found] == prompts  # for good: a pass of its own decides
    assert all(len(one.hypotheses) == 1 for one in found)
    assert len(passes) > 1
    assert 3 in whole


def test_the_likeliest_tokens_are_kept_for_many_positions_at_once() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = Keys(torch.randn(300, 8, generator=generator), torch.randn(300, generator=generator))
    scores = Scores((Part(torch.randn(10, 8, generator=generator), (keys,)),), 5)
    places = [(0, 1), (1, 4), (0, 1), (1, 0)]
    fresh = [scores.top(*place, 20) for place in places]
    scores.keep_top(places, 12)
    assert [scores.top(*place, 12) for place in places] == [one[:12] for one in fresh]
    assert [scores.top(*place, 20) for place in places] == fresh  # more than was kept
    scores.keep_top([], 12)
    scores.keep_top([(1, 2)], 1000)
    assert sorted(scores.top(1, 2, 300)) == list(range(300))


def test_several_prompts_come_in_one_tensor() -> None:
    tensors = [torch.randn(length, 4) for length in (3, 5, 3, 3)]
    states = States.from_tensor(tensors, 2)
    assert bool((states.several([0, 2, 3], 2) == torch.stack([tensors[i] for i in (0, 2, 3)])).all())
    assert bool((states.several([3, 0], 2) == torch.stack([tensors[i] for i in (3, 0)])).all())
    assert states.several([0, 2], 2).data_ptr() == states.at(0, 2).data_ptr()  # side by side: no copy


def test_large_states_are_finite_and_nan_is_not() -> None:
    large = torch.full((2, 3, 8), 3e38)  # their sum is not
    States.from_tensor(large, 1).require_finite(1)
    half = torch.full((2, 3, 4096), 6e4, dtype=torch.float16)
    States.from_tensor(half, 1).require_finite(1)
    for bad in (math.nan, math.inf, -math.inf):
        large[1, 2, 5] = bad
        with pytest.raises(StatesError, match="Prompt 1, layer 1, position 2"):
            States.from_tensor(large, 1).require_finite(1)


def test_how_far_others_are_is_told_without_positions() -> None:
    lazy = VerifiedPositions([7, 8], [0.1, 0.2], [1.0, 2.0], [2, 5], [4, 5], [9.0, 8.0])
    assert list(lazy.apart()) == [(9.0, 1.0, 2), (8.0, 2.0, 5)]
    alone = VerifiedPositions([7], [0.1], [1.0], [1])
    assert list(alone.apart()) == [(None, 1.0, 1)]
    assert alone[0].runner_up_id is None


def test_the_collector_rests_while_a_gpu_works_and_no_longer() -> None:
    assert gc.isenabled()
    with uninterrupted(torch.device("cpu")):
        assert gc.isenabled()
    resting = []

    def work() -> None:
        with uninterrupted(torch.device("cuda")):
            resting.append(not gc.isenabled())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    assert resting == [True]
    assert gc.isenabled()
    gc.disable()
    try:
        with uninterrupted(torch.device("cuda")):
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_on_a_cpu_nothing_is_sent_and_work_is_done_at_once() -> None:
    some = torch.arange(3)
    assert send(some, torch.device("cpu")) is some
    with Aside(torch.device("cpu")).work():
        assert some.sum() == 3
