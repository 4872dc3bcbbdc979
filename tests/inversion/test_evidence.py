"""States that no prompt reproduces exactly: read, judged, diagnosed; and those no prompt made, refused."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import preimage
from preimage import Observation
from preimage.inversion.engine import evidence, first_look, repairing
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.evidence import Level, noise_of_residual, weigh
from preimage.inversion.engine.reader import Reader
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.statistics import Statistics, statistics_of, tilt_of
from preimage.models import LanguageModel, new_model
from preimage.states import noise_of

VOCABULARY, LAYER = 300, 2
PROMPT = [(7 * i * i + 3 * i + 11) % VOCABULARY for i in range(24)]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return new_model("llama", (96, 3, 4), vocabulary=VOCABULARY, max_length=64, device="cpu")


@pytest.fixture(scope="module")
def states(model: LanguageModel) -> Tensor:
    return model.states(torch.tensor([PROMPT]), (LAYER,))[LAYER][0].clone()


@pytest.fixture(params=["scanned", "handed on"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vocabularies are tried in full before evidence is asked; large ones are not."""
    if request.param == "handed on":
        monkeypatch.setattr(repairing, "_SCANNED", 0)


def noise_like(states: Tensor, seed: int = 0) -> Tensor:
    """White noise as long as each state."""
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
    return noise / noise.norm(dim=-1, keepdim=True) * states.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("level", [0.01, 0.1, 0.4])
@pytest.mark.usefixtures("way")
def test_noisy_states_are_read(model: LanguageModel, states: Tensor, level: float) -> None:
    (result,) = preimage.invert(model, states + level * noise_like(states), LAYER)
    assert (result.status, list(result.token_ids)) == ("likely", PROMPT)
    assert result.reading.token_ids == result.token_ids
    assert len(result.positions) == len(PROMPT)
    assert "noise" in result.reason
    assert min(result.reading.confidence[1:]) > 0.5
    assert preimage.Inversion.from_dict(result.to_dict()) == result


@pytest.mark.usefixtures("way")
def test_another_precision_is_read(model: LanguageModel, states: Tensor) -> None:
    coarse = preimage.LanguageModel(
        type(model.module)(model.module.config), None, name="coarse", anatomy=None
    )
    coarse.module.load_state_dict(model.module.state_dict())
    coarse.module.to(torch.bfloat16)
    seen = coarse.states(torch.tensor([PROMPT]), (LAYER,))[LAYER][0]
    (result,) = preimage.invert(model, seen, LAYER)
    assert result.status == "likely"
    right = [a == b for a, b in zip(result.reading.token_ids, PROMPT, strict=True)]
    assert sum(right) >= len(PROMPT) - 1
    sure = [ok for ok, confidence in zip(right, result.reading.confidence, strict=True) if confidence > 0.99]
    assert all(sure)


def test_a_token_that_has_a_twin_is_half_sure(states: Tensor) -> None:
    model = new_model("llama", (96, 3, 4), vocabulary=VOCABULARY, max_length=64, device="cpu")
    with torch.no_grad():
        table = model.anatomy.embedding.weight
        table[299], table[298] = table[PROMPT[7]], table[PROMPT[12]] + 1e-4
    model = preimage.load(model.module)
    seen = model.states(torch.tensor([PROMPT]), (LAYER,))[LAYER][0]
    (result,) = preimage.invert(model, seen + 0.1 * noise_like(seen), LAYER)
    assert result.status == "likely"
    for at in (7, 12):
        assert result.reading.confidence[at] < 0.6
    assert min(result.reading.confidence[8:12]) > 0.9


@pytest.mark.usefixtures("way")
def test_exact_states_are_recovered_as_before(model: LanguageModel, states: Tensor) -> None:
    (result,) = preimage.invert(model, states, LAYER)
    assert (result.status, list(result.token_ids)) == ("recovered", PROMPT)
    assert result.reading.confidence == (1.0,) * len(PROMPT)


def states_nobody_made(model: LanguageModel, states: Tensor) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    others = torch.randint(VOCABULARY, (7, len(PROMPT)), generator=generator)
    rest = model.states(others, (LAYER,))[LAYER]
    vector = torch.randn(states.shape[1], generator=generator)
    usual = states.norm(dim=1).median()
    foreign = new_model("llama", (96, 3, 4), vocabulary=VOCABULARY, max_length=64, seed=5, device="cpu")
    for length in (1, 2, 5, 24):
        yield f"average of two, {length}", ((states + rest[0]) / 2)[:length]
        yield f"average of eight, {length}", torch.cat([states[None], rest]).mean(dim=0)[:length]
        yield f"steered, {length}", (states + usual * vector / vector.norm())[:length]
        yield f"steered by a state, {length}", (states + 0.7 * (rest[1, 3] - rest[2, 5]))[:length]
        yield f"random, {length}", noise_like(states, 9)[:length]
        yield f"another model, {length}", foreign.states(torch.tensor([PROMPT]), (LAYER,))[LAYER][0, :length]


@pytest.mark.usefixtures("way")
def test_states_no_prompt_made_are_not_likely(model: LanguageModel, states: Tensor) -> None:
    wrong = {}
    for name, seen in states_nobody_made(model, states):
        (result,) = preimage.invert(model, seen, LAYER)
        if result.status != "not_recovered":
            wrong[name] = (result.status, result.reason)
        assert len(result.reading.token_ids) == len(seen), name  # there is a reading always
        assert max(result.reading.confidence) <= 0.9, name
    assert not wrong


@pytest.mark.usefixtures("way")
def test_a_state_changed_in_the_middle_is_no_noise(model: LanguageModel, states: Tensor) -> None:
    changed = states.clone()
    changed[9] += 0.3 * noise_like(states)[9]
    (result,) = preimage.invert(model, changed, LAYER)
    assert (result.status, result.failed_position) == ("not_recovered", 9)
    assert list(result.token_ids) == PROMPT[:9]
    assert list(result.reading.token_ids[:9]) == PROMPT[:9]
    assert len(result.reading.token_ids) == len(PROMPT)
    assert sum(a == b for a, b in zip(result.reading.token_ids, PROMPT, strict=True)) >= len(PROMPT) - 2


@pytest.mark.parametrize("level", [0.0, 0.05, 0.2])
@pytest.mark.usefixtures("way")
def test_another_layer_is_named(model: LanguageModel, level: float) -> None:
    below = model.states(torch.tensor([PROMPT]), (1, "final"))
    first, last = (one[0] + level * noise_like(one[0]) for one in below.values())
    (result,) = preimage.invert(model, first, LAYER)
    assert result.status == "not_recovered"
    assert "layer 1, not 2" in result.reason
    assert list(result.reading.token_ids) == PROMPT
    (result,) = preimage.invert(model, last, 3)
    assert "layer final, not 3" in result.reason


@pytest.mark.parametrize("level", [0.0, 0.1])
@pytest.mark.usefixtures("way")
def test_a_known_prefix_is_read_behind(model: LanguageModel, states: Tensor, level: float) -> None:
    seen = (states + level * noise_like(states))[6:]
    (result,) = preimage.invert(model, seen, LAYER, prefix=PROMPT[:6])
    assert result.status == ("likely" if level else "recovered")
    assert list(result.token_ids) == PROMPT[6:]
    assert [position.index for position in result.positions] == list(range(len(PROMPT) - 6))
    assert result.reading.token_ids == result.token_ids
    (result,) = preimage.invert(model, seen, LAYER)  # without it nothing fits
    assert result.status != "recovered"


@pytest.mark.usefixtures("way")
def test_some_coordinates_are_enough(model: LanguageModel, states: Tensor) -> None:
    kept = tuple(range(0, 96, 2))
    seen = states[:, list(kept)]
    (result,) = preimage.invert(model, seen, LAYER, observe=Observation(kept=kept))
    assert (result.status, list(result.token_ids)) == ("recovered", PROMPT)
    noisy = seen + 0.05 * noise_like(states)[:, list(kept)]
    (result,) = preimage.invert(model, noisy, LAYER, observe=Observation(kept=kept))
    assert (result.status, list(result.token_ids)) == ("likely", PROMPT)


@pytest.mark.usefixtures("way")
def test_what_was_given_a_budget_keeps_it(model: LanguageModel, states: Tensor) -> None:
    noisy = states + 0.1 * noise_like(states)
    (result,) = preimage.invert(model, noisy, LAYER, max_tests=40)
    assert result.status == "not_recovered"
    assert result.tests <= 40
    assert len(result.reading.token_ids) == len(PROMPT)


def test_noise_is_weighted_down() -> None:
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(8, 64, generator=generator)
    sample = torch.randn(1, 4000, 8, generator=generator) @ few
    statistics = Statistics.of(sample, sample[0, :40] - sample[0, 40:80])
    states = torch.randn(32, 8, generator=generator) @ few
    for level in (0.1, 0.5, 2.0):
        noisy = states + level * noise_like(states)
        relative = level / math.sqrt(1 + level**2)
        assert (statistics.denoised(noisy, relative) - states).norm() < 0.6 * (noisy - states).norm()


@pytest.mark.parametrize("level", [0.0, 0.4])
def test_prompts_read_together_are_read_as_one_by_one(
    model: LanguageModel, level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairing, "_SCANNED", 0)
    prompts = [PROMPT[:n] for n in (24, 17, 3, 1)] + [PROMPT[::-1]]
    rows = [model.states(torch.tensor([ids]), (LAYER,))[LAYER][0] for ids in prompts]
    rows = [one + level * noise_like(one, seed) for seed, one in enumerate(rows)]
    tap = Verifier(model, LAYER, noise=noise_of(model, LAYER)[LAYER])
    reads = []
    for together in (False, True):
        reader = Reader(model, tap, build_proposer(model, LAYER))
        reader._answers.together = together
        begun = [reader.begin(one, Budget(10**9, None), ()) for one in rows]
        reader.look(begun)
        reads.append([one.ids for one in reader.read(begun)])
    assert reads[0] == reads[1]
    assert reads[0][0][1:] == prompts[0][1:]


def test_coordinates_are_filled_in_from_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 4000, 3, generator=generator) @ torch.randn(3, 8, generator=generator)
    statistics = Statistics.of(rows, rows[0, :40] - rows[0, 40:80])
    kept = (0, 2, 3, 6)
    whole = statistics.filled_in(rows[0, :50, list(kept)], kept)
    assert torch.allclose(whole, rows[0, :50], atol=1e-2)
    assert statistics.cut(kept).spread.shape == (4,)


def test_what_wrong_tokens_leave_over_is_no_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((40,), 16.0, dtype=torch.float64)
    white = torch.randn(40, 256, generator=generator, dtype=torch.float64)
    white = 3.2 * white / white.norm(dim=1, keepdim=True)
    slope = torch.linspace(3, 0.3, 256, dtype=torch.float64)
    wrong = slope * torch.randn(40, 256, generator=generator, dtype=torch.float64)
    tilt = float(tilt_of(wrong).median())
    assert tilt > 5
    assert noise_of_residual(white, lengths, tilt) == (pytest.approx(0.2, rel=0.05), True)
    assert not noise_of_residual(wrong, lengths, tilt).white
    assert noise_of_residual(white + 0.3 * wrong, lengths, tilt).relative == pytest.approx(0.2, rel=0.2)
    some = torch.where(torch.arange(40)[:, None] % 2 == 0, white, white / 100)  # half of them fit
    assert noise_of_residual(some, lengths, tilt).relative < 0.02
    assert not noise_of_residual(white, lengths, tilt=2.0).white  # where wrong tokens are as even as noise
    noise = evidence.Noise(0.2, True)
    assert noise.allows(3.0, 16.0, 16.0)
    assert noise.allows(3.0, 64.0, 16.0)  # as long at every position, whatever the state
    assert not noise.allows(1.0, 16.0, 16.0)


def test_states_take_part_in_few_directions_that_wrong_tokens_share(model: LanguageModel) -> None:
    statistics = statistics_of(model, LAYER)
    assert float(statistics.tilt) > 1
    assert float(statistics.cut(tuple(range(8))).tilt) >= 1


def test_noise_that_the_states_do_not_bear_out_is_forgotten(
    model: LanguageModel, states: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Verifier(model, LAYER, noise=noise_of(model, LAYER)[LAYER])
    monkeypatch.setattr(first_look, "noise_of_residual", lambda *_: evidence.Noise(0.4, True))
    reader = Reader(model, verifier, build_proposer(model, LAYER))
    begun = [reader.begin(states, Budget(10**9, None), ())]
    (look,) = reader.look(begun)
    assert look.noise is not None
    (read,) = reader.read(begun)
    assert read.ids == PROMPT
    assert all(away <= radius for away, radius in zip(read.distances, read.radii, strict=True))


def test_states_that_have_nothing_in_common_with_a_layer_are_named_before_any_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repairing, "_SCANNED", 0)
    monkeypatch.setitem(repairing._PATIENCE, "cpu", 16)
    built, other = (
        new_model("llama", (96, 3, 4), vocabulary=VOCABULARY, max_length=64, device="cpu", seed=seed)
        for seed in (0, 1)
    )
    module: Any = built.module
    module.model.embed_tokens.weight.data += torch.linspace(-0.05, 0.05, 96)  # as trained ones have something
    leaning = preimage.load(module)
    ids = torch.tensor([PROMPT])
    foreign = other.states(ids, (LAYER,))[LAYER][0]
    (result,) = preimage.invert(leaning, foreign, LAYER)
    assert result.status == "not_recovered"
    assert "have nothing in common with what it computes at layer 2" in result.reason
    assert len(result.reading.token_ids) == len(PROMPT)
    assert set(result.reading.confidence) == {0.0}
    assert result.tests < VOCABULARY
    own = leaning.states(ids, (LAYER,))[LAYER][0].clone()
    for changed in (own, own + noise_like(own), 3 * own):  # noise as long as the states, another scale
        (result,) = preimage.invert(leaning, changed, LAYER)
        assert "nothing in common" not in result.reason


def weighed(distances: list[float], level: Level, vocabulary: int = 10**6) -> float:
    return weigh(
        list(range(len(distances))), torch.tensor(distances), torch.zeros(len(distances)), level,
        length=1.0, floor=0.0, vocab_size=vocabulary,
    ).confidence  # fmt: skip


def test_confidence_follows_the_evidence() -> None:
    white = Level(512)
    for position in range(20):
        noise = torch.randn(512, generator=torch.Generator().manual_seed(position))
        white.note(0.2 * (1 + 0.01 * position), noise)
    assert white.white
    assert white.directions == pytest.approx(256)
    assert weighed([0.2, 0.3], white) > weighed([0.2, 0.21], white) > 0.5
    assert weighed([0.2, 0.3], white) > weighed([0.5, 0.6], white)  # further than right tokens are elsewhere
    assert weighed([0.2], white) < 0.9  # nothing to compare with
    assert weighed([0.2, 0.3], white, vocabulary=2) > weighed([0.2, 0.3], white)  # nothing left to try
    tilted = Level(512)
    for _ in range(20):
        tilted.note(0.2, torch.linspace(9, 0.1, 512))
    assert not tilted.white
    assert tilted.directions < white.directions
    assert math.isclose(evidence.untried(16), 0.15)
    assert evidence.untried(1024) < evidence.untried(64)
