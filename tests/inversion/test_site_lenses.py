"""Lenses for what is seen inside a block: trained, kept, found, and exact as every proposer is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import preimage
from preimage.errors import LayerError, ModelError, OptionError, PreimageError
from preimage.inversion.proposers import lens_files
from preimage.inversion.proposers.lens_files import default_path, find_lens, read_info, read_lens
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.standard import LensProposer
from preimage.models import without_positions
from preimage.observations import Site
from preimage.storage import write_tensors
from preimage.training import LensOptions, train_lens
from support.refusing import refused
from support.tiny import random_ids, tiny

SMALL = LensOptions(steps=40, batch_tokens=512, length=16, rank=16, hidden=64)
QUICK = LensOptions(steps=1, batch_tokens=64, length=8, rank=4, hidden=8)
PROMPTS = [random_ids(14), random_ids(1, 3)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))


@pytest.mark.parametrize("place", ["keys", "values", "kv"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_lens_of_a_site_gives_prompts_back(name: str, place: str) -> None:
    model, site = tiny(name), Site(2, place)
    path = default_path(model, site)
    assert path.name == f"layer-2-{place}.safetensors"
    states = preimage.capture(model, PROMPTS, 2, observe=place)
    assert {result.proposer for result in preimage.invert(model, states)} == {"codebook"}
    trained = train_lens(model, site, "random", SMALL, out=path)
    assert trained.held_out["random"]["rank0"] > 0.15  # chance is 1 in 41
    info = find_lens(model, site)
    assert info is not None
    assert (info.path, info.layer, info.place) == (path, 2, place)
    assert info.tap == without_positions(model, site)
    assert info.shape.d_model == model.width(site)
    assert {result.proposer for result in preimage.invert(model, states)} == {f"lens-2.{place}"}
    results = preimage.invert(model, states, proposers="lens")
    assert [list(result.token_ids) for result in results] == PROMPTS
    assert {(result.status, result.proposer) for result in results} == {("recovered", f"lens-2.{place}")}
    assert build_proposer(model, site).name == f"lens-2.{place}"
    assert build_proposer(model, site, ("lens", "codebook")).name == f"lens-2.{place}+codebook"


def test_a_lens_serves_its_own_site_alone() -> None:
    model = tiny("llama")
    for tap in (Site(2, "keys"), 1):
        train_lens(model, tap, "random", QUICK, out=default_path(model, tap))
    of_keys, of_a_layer = find_lens(model, Site(2, "keys")), find_lens(model, 0)
    assert of_keys is not None
    assert of_a_layer is not None
    assert (of_keys.tap, of_a_layer.tap) == (Site(2, "keys", "before"), 1)
    assert find_lens(model, Site(2, "keys", "before")) == of_keys
    for other in (Site(1, "keys"), Site(3, "keys"), Site(2, "values"), Site(2, "kv"), 2, "final"):
        assert find_lens(model, other) is None
    assert find_lens(tiny("llama", seed=1), Site(2, "keys")) is None


def test_keys_beside_values_are_read_by_the_lenses_of_both() -> None:
    model, both = tiny("llama"), Site(2, "kv")
    states = preimage.capture(model, PROMPTS, 2, observe="kv")
    refused(OptionError, lambda: preimage.invert(model, states, proposers="lens"))
    train_lens(model, Site(2, "keys"), "random", SMALL, out=default_path(model, Site(2, "keys")))
    (first, _) = preimage.invert(model, states)
    assert (first.proposer, list(first.token_ids)) == ("lens-2.keys", PROMPTS[0])
    train_lens(model, Site(2, "values"), "random", SMALL, out=default_path(model, Site(2, "values")))
    assert build_proposer(model, both).name == "lens-2.keys+lens-2.values"
    results = preimage.invert(model, states)
    assert [list(result.token_ids) for result in results] == PROMPTS
    assert find_lens(model, both) is None
    before = preimage.capture(model, PROMPTS, 2, observe=preimage.Observation("kv", rotary="before"))
    assert [list(one.token_ids) for one in preimage.invert(model, before)] == PROMPTS


def test_keys_are_turned_back_before_a_lens_reads_them() -> None:
    model, after, before = tiny("llama"), Site(2, "keys"), Site(2, "keys", "before")
    lens = train_lens(model, after, "random", SMALL).lens
    ids = torch.tensor([random_ids(100)])
    states = model.states(ids, (after, before))
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    proposers = [LensProposer(model, tap, lens, before) for tap in (after, before)]
    assert {proposer.name for proposer in proposers} == {"lens-2.keys"}
    first, second = (
        proposer.score(states[tap], everywhere).best()
        for proposer, tap in zip(proposers, (after, before), strict=True)
    )
    assert torch.equal(first, second)


def test_more_neighbours_widen_the_window(tmp_path: Path) -> None:
    model, site = tiny("gpt2"), Site(1, "values")
    wide, alone = (replace(QUICK, neighbours=count) for count in (3, 0))
    path = tmp_path / "wide.safetensors"
    assert train_lens(model, site, "random", wide, out=path).lens.linear.in_features == 7 * model.width(site)
    assert read_lens(path, model).shape.neighbours == 3
    assert train_lens(model, site, "random", alone).lens.linear.in_features == model.width(site)


@pytest.mark.parametrize(
    ("tap", "kind", "said"),
    [
        (Site(9, "keys"), LayerError, "no layer 9"),
        (Site(0, "keys"), OptionError, "Layer 0 has no keys"),
        (Site(1, "queries"), OptionError, "'queries' is not known"),
        (Site(1, "values", "before"), OptionError, "no rotary positions"),
        (9, LayerError, "no layer 9"),
    ],
    ids=str,
)
def test_what_a_model_does_not_have_is_refused(tap: Site | int, kind: type[PreimageError], said: str) -> None:
    assert said in refused(kind, lambda: train_lens(tiny("llama"), tap, "random", SMALL)).message


def test_a_header_that_names_no_place_of_a_model_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    lens = train_lens(model, 1, "random", QUICK).lens
    good = lens_files.save_lens(
        lens, tmp_path / "good", tap=Site(1, "keys", "before"), model=model, training={}, ranks={}
    )
    assert read_info(good).tap == Site(1, "keys", "before")
    about = {
        "schema": "preimage/1", "kind": "lens", "model": "m", "weight_hash": "0" * 64,
        "training": {}, "ranks": {}, "shape": lens.shape.to_dict(),
    }  # fmt: skip
    old = write_tensors(tmp_path / "old", lens.state_dict(), about | {"layer": "final"})
    assert (read_info(old).tap, read_info(old).place) == ("final", "residual")
    for wrong in ({"layer": 1, "place": "queries"}, {"layer": "final", "place": "keys", "rotary": "before"}):
        path = write_tensors(tmp_path / "wrong", lens.state_dict(), about | wrong)
        assert "is not a lens" in refused(ModelError, lambda path=path: read_info(path)).message
