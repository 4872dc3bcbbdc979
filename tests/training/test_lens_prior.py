"""Lenses that take in what the model expects, and when one is trained unasked."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import preimage
from preimage.errors import OptionError
from preimage.inversion.proposers import lens_files
from preimage.inversion.proposers.features import features_for
from preimage.inversion.proposers.lens_files import read_info, read_lens
from preimage.inversion.proposers.standard import LensProposer
from preimage.observations import Site
from preimage.training import LensOptions, is_worth_training, train_lens, training_tokens
from support.refusing import refused
from support.tiny import build, random_ids, tiny

SMALL = LensOptions(steps=40, batch_tokens=256, length=12, rank=16, hidden=32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lens") / "final.safetensors"
    train_lens(tiny("llama"), "final", "random", SMALL, out=path)
    return path


def test_near_the_top_of_a_model_a_lens_weighs_in_what_is_expected(trained: Path) -> None:
    info = read_info(trained)
    assert (info.shape.prior, info.training["prior"]) == (1, True)
    low = train_lens(tiny("llama"), 1, "random", replace(SMALL, steps=2)).lens
    assert (low.shape.prior, hasattr(low, "belief")) == (0, False)
    asked = train_lens(tiny("llama"), 1, "random", replace(SMALL, steps=2, prior=True)).lens
    assert asked.shape.prior == 1


def test_scores_are_those_of_the_lens_and_of_the_head_as_far_as_it_is_believed(trained: Path) -> None:
    model = tiny("llama")
    lens = read_lens(trained, model)
    ids = torch.tensor([random_ids(10, seed) for seed in range(3)])
    states = model.states(ids, ("final",))["final"]
    scores = LensProposer(model, "final", lens, "final").score(states, torch.ones_like(ids, dtype=torch.bool))
    found = torch.cat([scores.at(rows) for rows in scores.slices()]).view(3, 10, -1)
    with torch.inference_mode():
        before = torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
        keys = lens.keys(features_for(model, lens.shape))
        assert model.unembedding is not None
        wanted = lens(states, keys, before @ model.unembedding.T)
        without = lens(states, keys)
    assert torch.allclose(found, wanted, atol=2e-2, rtol=2e-3)  # keys are kept in half precision
    assert not torch.allclose(found[:, 1:], without[:, 1:], atol=2e-2, rtol=2e-3)
    assert torch.allclose(found[:, :1], without[:, :1], atol=2e-2, rtol=2e-3)  # nothing stands before it


@pytest.mark.parametrize("layer", [3, "final"])
def test_prompts_are_recovered_with_it(trained: Path, layer: int | str) -> None:
    model = tiny("llama")
    prompts = [random_ids(14, seed) for seed in (1, 2)]
    found = preimage.invert(model, preimage.capture(model, prompts, layer), lens=trained)
    assert [list(one.token_ids) for one in found] == prompts
    assert {one.proposer for one in found} == {"lens-final"}


def test_a_model_without_a_head_is_read_without_expectation(trained: Path) -> None:
    backbone = preimage.load(build("llama").model)
    assert backbone.unembedding is None
    assert backbone.identity.weight_hash == tiny("llama").identity.weight_hash
    ids = random_ids(12, 4)
    (found,) = preimage.invert(backbone, preimage.capture(backbone, [ids], "final"), lens=trained)
    assert (found.status, list(found.token_ids)) == ("recovered", ids)


def test_what_is_seen_inside_a_block_leaves_nothing_to_be_expected() -> None:
    model = tiny("llama")
    error = refused(
        OptionError, lambda: train_lens(model, Site(2, "keys"), "random", replace(SMALL, prior=True))
    )
    assert "expects" in error.message
    assert train_lens(model, Site(3, "values"), "random", replace(SMALL, steps=2)).lens.shape.prior == 0


def test_a_lens_is_worth_training_where_there_is_none_and_much_to_invert(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    cost = training_tokens(model, "final")
    assert cost == 100_000 + 3 * 1200 * 2048
    assert not is_worth_training(model, "final", cost // 8 - 1)
    assert is_worth_training(model, "final", cost // 8 + 1)
    monkeypatch.setattr(lens_files, "known_lenses", lambda: [read_info(trained)])
    assert not is_worth_training(model, "final", 10 * cost)
