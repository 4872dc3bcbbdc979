"""Doubtful positions tried together: few passes, the same prompts, and nothing accepted that does not fit."""

import pytest
import torch
from torch import Tensor

import preimage
from preimage.inversion.engine import guessing, verifier
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.jobs import Job
from preimage.inversion.engine.verifier import Verifier
from preimage.models import LanguageModel
from preimage.states import noise_of
from support.planted import VOCABULARY, Planted, ids_of, run, states_of
from support.tiny import build, random_ids

LENGTH = 40


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return preimage.load(build("llama", vocab_size=VOCABULARY, max_position_embeddings=1024))


@pytest.mark.parametrize("together", [True, False])
def test_many_wrong_proposals_are_mended_in_few_passes(model: LanguageModel, together: bool) -> None:
    prompts = [random_ids(LENGTH, seed, VOCABULARY) for seed in range(3)]
    wrong = dict.fromkeys(range(3, LENGTH, 4), 3)  # ten of forty, the right one fourth
    found, passes = run(model, Planted(prompts, wrong), states_of(model, prompts), together)
    assert [ids_of(outcome) for outcome in found] == prompts
    assert all(len(outcome.hypotheses) == 1 for outcome in found)
    assert passes <= (6 if together else 18)  # position by position it would be twenty or more for each


@pytest.mark.parametrize("together", [True, False])
def test_tokens_that_were_ranked_low_are_found_behind_others_that_were(
    model: LanguageModel, together: bool
) -> None:
    prompts = [random_ids(LENGTH, seed, VOCABULARY) for seed in (7, 8)]
    for ranks in ({5: 20, 6: 100, 30: 7}, {1: 300, 2: 1}, {0: 12, LENGTH - 1: 40}):
        found, _ = run(model, Planted(prompts, ranks), states_of(model, prompts), together)
        assert [ids_of(outcome) for outcome in found] == prompts


@pytest.mark.parametrize("together", [True, False])
def test_long_prompts_are_run_before_their_branches(model: LanguageModel, together: bool) -> None:
    prompts = [random_ids(700, 3, VOCABULARY)]
    wrong = dict.fromkeys(range(50, 700, 50), 4)
    found, _ = run(model, Planted(prompts, wrong), states_of(model, prompts), together)
    assert ids_of(found[0]) == prompts[0]
    assert len(found[0].hypotheses) == 1


@pytest.mark.parametrize("together", [True, False])
def test_a_token_nobody_put_there_is_not_accepted(model: LanguageModel, together: bool) -> None:
    prompts = [random_ids(LENGTH, 11, VOCABULARY)]
    states = states_of(model, prompts)[0].clone()
    away = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(0))
    states[20] += 0.05 * states[20].norm() * away
    found, _ = run(model, Planted(prompts, {9: 2, 25: 2}), [states], together)
    assert found[0].hypotheses == ()
    assert ids_of(found[0])[:20] == prompts[0][:20]


def test_what_is_tried_beforehand_is_what_is_likely_and_not_sure(model: LanguageModel) -> None:
    prompts = [random_ids(LENGTH, 12, VOCABULARY)]
    proposer = Planted(prompts, {4: 2, 9: 1}, sure=30.0)
    tokens, chances = proposer.score(torch.zeros(1), torch.ones(1, LENGTH)).likeliest()
    assert tokens[0, :, 0].tolist() == [
        (token + (at in (4, 9))) % VOCABULARY for at, token in enumerate(prompts[0])
    ]
    assert bool((chances[0, [at for at in range(LENGTH) if at not in (4, 9)], 0] > 0.99).all())
    target = Verifier(model, 2, noise=noise_of(model, (2,))[2]).targets(states_of(model, prompts))
    job = Job(
        0,
        target.low[0],
        target,
        tokens[0, :, 0],
        tokens[0],
        chances[0],
        Budget(1, None),
        lambda: model.prefix(2),
    )
    guessing.look_ahead([job], tokens, chances)
    assert job.misses == pytest.approx(float((1 - chances[..., 0]).sum()))
    assert {at for at, _ in guessing.beforehand(job)} == {4, 9}
    assert (4, prompts[0][4]) in guessing.beforehand(job)
    assert (9, prompts[0][9]) in guessing.beforehand(job)


def test_a_prompt_that_fits_in_another_shape_of_the_pass_fits(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a batch rounds otherwise than a plain pass; here a plain pass is moved a little."""
    ids = random_ids(12, 5, VOCABULARY)
    states = model.states(torch.tensor([ids]), (2,))[2][0]
    checker = Verifier(model, 2, noise=noise_of(model, (2,))[2])
    target = checker.target(states)
    off = 3 * target.radii[4] / states.shape[1] ** 0.5
    plain = type(model).states

    def moved(self: LanguageModel, rows: Tensor, layers: tuple[int, ...]) -> dict[int, Tensor]:
        found = {layer: some.clone() for layer, some in plain(self, rows, layers).items()}
        if len(rows) == 1:
            found[2][:, 4] += off
        return found

    monkeypatch.setattr(type(model), "states", moved)
    assert checker.whole_sequence(ids, target)[4] > target.radii[4]
    monkeypatch.setitem(verifier.LARGE, "cpu", 4 * LENGTH)
    assert checker.whole_sequence(ids, target)[4] <= target.radii[4]
    off *= 32  # too far for any shape
    assert checker.whole_sequence(ids, target)[4] > target.radii[4]
