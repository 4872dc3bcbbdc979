"""Prompts from keys, values and parts of a block: exactly, or not at all."""

from pathlib import Path

import pytest
import torch

import preimage
from preimage import Observation
from preimage.errors import OptionError
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.codebook import cache_path
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.standard import CodebookProposer
from preimage.models import without_positions
from preimage.observations import Site
from preimage.states import noise_of
from support.refusing import refused
from support.tiny import NAMES, random_ids, tiny

PLACES = ("keys", "values", "kv", "attention", "mlp")
PROMPTS = [random_ids(14), random_ids(1, 3), random_ids(27, 1)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_every_site_gives_the_prompt_back(name: str, place: str) -> None:
    model = tiny(name)
    states = preimage.capture(model, PROMPTS, [1, 3], observe=place)
    for block in (1, 3):
        for result, ids in zip(preimage.invert(model, states, block), PROMPTS, strict=True):
            assert (result.status, list(result.token_ids), result.layer) == ("recovered", ids, block)
            assert result.proposer == "codebook"
            assert preimage.Inversion.from_dict(result.to_dict()) == result


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "gemma3", "gpt2"])
def test_keys_before_rotary_give_it_back_too(name: str) -> None:
    model = tiny(name)
    for place in ("keys", "kv"):
        states = preimage.capture(model, PROMPTS, 2, observe=Observation(place, "before"))
        results = preimage.invert(model, states)
        assert [list(result.token_ids) for result in results] == PROMPTS
        assert {result.status for result in results} == {"recovered"}


@pytest.mark.parametrize("place", PLACES)
def test_changed_keys_are_not_taken_for_the_prompt(place: str) -> None:
    model, ids = tiny("llama"), random_ids(9)
    (observed,) = [preimage.capture(model, [ids], 2, observe=place).at(0, 2)]
    other = preimage.capture(model, [random_ids(9, 5)], 2, observe=place).at(0, 2)
    for position in (0, 4, 8):
        damaged = observed.clone()
        damaged[position] = other[position] + 0.01
        states = preimage.States.from_tensor(damaged, 2, observation=preimage.Observation(place))
        (result,) = preimage.invert(model, states)
        assert (result.status, result.failed_position) == ("not_recovered", position)
    # what was seen is part of the question: values are no keys
    wrong = preimage.States.from_tensor(
        observed, 2, observation=Observation({"keys": "values", "attention": "mlp"}.get(place, "keys"))
    )
    if wrong.d_model == model.width(Site(2, wrong.observation.place)):
        assert preimage.invert(model, wrong)[0].status == "not_recovered"
    before = preimage.States.from_tensor(observed, 2, observation=Observation("keys", "before"))
    if place == "keys":
        assert preimage.invert(model, before)[0].failed_position == 1  # nothing is turned at the first


@pytest.mark.parametrize("method", ["sipit", "brute-force"])
@pytest.mark.parametrize("place", ["keys", "values", "mlp"])
def test_searches_read_sites_too(method: str, place: str) -> None:
    model, ids = tiny("llama"), random_ids(5)
    states = preimage.capture(model, [ids], 2, observe=place)
    for published in (False, True):
        (result,) = preimage.invert(model, states, method=method, published_cost=published)
        assert (result.status, list(result.token_ids)) == ("recovered", ids)


def test_a_proof_tries_every_token_at_the_site() -> None:
    model, ids = tiny("llama"), random_ids(6)
    (result,) = preimage.invert(model, preimage.capture(model, [ids], 2, observe="kv"), prove=True)
    assert (result.status, result.unique, list(result.token_ids)) == ("recovered", "proved", ids)
    assert result.margin is not None
    assert result.margin > 0
    alone = model.prefix(Site(2, "kv"))
    alone.extend(torch.tensor(ids[:5]))
    tried = alone.try_tokens(torch.arange(model.vocab_size)).double()
    apart = (tried - tried[ids[5]]).norm(dim=1)
    apart[ids[5]] = torch.inf
    assert result.positions[5].margin == pytest.approx(float(apart.min()), rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("place", PLACES)
def test_prompts_that_share_passes_come_back_the_same(name: str, place: str) -> None:
    model, site = tiny(name), Site(2, place)
    observed = [model.states(torch.tensor([ids]), (site,))[site][0] for ids in PROMPTS]
    verifier = Verifier(model, site, noise=noise_of(model, site)[site])
    engine = FastInverter(model, verifier, build_proposer(model, site), together=True)
    outcomes = engine.run(observed, [Budget(10**6, None) for _ in observed])
    found = [[fit.position.token_id for fit in outcome.hypotheses[0]] for outcome in outcomes]
    assert found == PROMPTS


def test_one_state_of_block_one_is_not_taken_for_its_prompt() -> None:
    model, ids = tiny("llama"), [*random_ids(6), 7]  # values there say nothing of what came before
    states = preimage.capture(model, [ids], 1, observe="values", positions="last")
    (result,) = preimage.invert(model, states)
    assert (result.status, result.complete) == ("ambiguous", False)


def test_the_prior_is_for_the_stream_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))  # in which there is no lens
    model = tiny("llama")
    states = preimage.capture(model, [[5, 6]], 2, observe="keys")
    for name in ("prior", "codebook,prior"):
        error = refused(OptionError, lambda name=name: preimage.invert(model, states, proposers=name))
        assert "reads the residual stream, not keys" in error.message
    error = refused(OptionError, lambda: preimage.invert(model, states, proposers="lens"))
    assert "no lens for keys of layer 2" in error.message
    (result,) = preimage.invert(model, states, proposers="codebook,gradient")
    assert result.status == "recovered"


@pytest.mark.parametrize("place", ["keys", "kv"])
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "qwen3", "phi3"])
def test_a_codebook_reads_keys_at_positions_it_was_not_fitted_at(name: str, place: str) -> None:
    model, site = tiny(name), Site(1, place)
    ids = torch.tensor([random_ids(120)])  # it was fitted on windows of 64
    assert without_positions(model, site) == Site(1, place, "before")
    assert cache_path(model, site, 8) != cache_path(model, Site(1, place, "before"), 8)
    observed = model.states(ids, (site,))[site]
    first = CodebookProposer(model, site).score(observed, torch.ones_like(ids, dtype=torch.bool)).best()
    assert float((first == ids).float().mean()) > 0.95


def test_without_rotary_nothing_is_turned() -> None:
    for kind in ("values", "attention", "mlp"):
        assert without_positions(tiny("llama"), Site(1, kind)) == Site(1, kind)
    assert without_positions(tiny("llama"), 2) == 2
    before = Site(1, "keys", "before")
    assert without_positions(tiny("llama"), before) == before


def test_a_run_of_keys_is_not_continued_as_one_of_values(tmp_path: Path) -> None:
    model, rows = tiny("llama"), torch.randn(1, 4, 16)
    keys, values = (
        preimage.States.from_tensor(rows, 2, observation=preimage.Observation(place))
        for place in ("keys", "values")
    )
    preimage.invert(model, keys, out=tmp_path / "run")
    refused(preimage.errors.RunFolderError, lambda: preimage.invert(model, values, out=tmp_path / "run"))
