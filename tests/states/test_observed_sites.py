"""States that are keys, values or parts of a block: captured, kept, opened, and their noise."""

import json
from pathlib import Path

import pytest
import torch

import preimage
from preimage import Observation, States
from preimage.errors import LayerError, OptionError, StatesError
from preimage.models import LanguageModel
from preimage.observations import Site
from preimage.states import noise as noise_module
from preimage.states import noise_floor, noise_of, states_from
from support.bundles import MANIFEST, PROMPTS, manifest_of, same_numbers
from support.folders import make_folder
from support.refusing import refused
from support.tiny import NAMES, build, random_ids, tiny

PLACES = [("keys", "after"), ("keys", "before"), ("values", "after"), ("kv", "after"), ("kv", "before"),
          ("attention", "after"), ("mlp", "after")]  # fmt: skip


@pytest.mark.parametrize(("place", "rotary"), PLACES)
@pytest.mark.parametrize("positions", ["all", "last"])
def test_what_is_captured_is_what_a_pass_shows_and_what_is_opened(
    place: str, rotary: str, positions: str, tmp_path: Path
) -> None:
    model, seen = tiny("llama"), Observation(place, rotary)
    states = preimage.capture(model, PROMPTS, [1, 3], observe=seen, positions=positions)
    streamed = preimage.capture(model, PROMPTS, [1, 3], observe=seen, positions=positions, out=tmp_path / "b")
    states.save(tmp_path / "a")
    for one in (states, streamed, preimage.open_states(tmp_path / "a"), preimage.open_states(tmp_path / "b")):
        same_numbers(one, states)
        assert (one.observation, one.layers) == (seen.changed(positions=positions), (1, 3))
        assert one.noise_floor == states.noise_floor
        one.require_made_by(model)
    assert manifest_of(tmp_path / "a")["observation"] == seen.changed(positions=positions).where
    assert states.noise_floor == {
        k: noise_floor(model, [Site(k, place, rotary)])[Site(k, place, rotary)] for k in (1, 3)
    }
    for prompt, ids in enumerate(PROMPTS):
        for block in (1, 3):
            site = Site(block, place, rotary)
            direct = model.states(torch.tensor([ids]), (site,))[site][0]
            assert torch.equal(states.at(prompt, block), direct if positions == "all" else direct[-1:])
            assert torch.equal(states.last(block)[prompt], direct[-1])


def test_states_say_what_they_hold() -> None:
    model = tiny("llama")
    said = [repr(preimage.capture(model, [[5]], 1, observe=seen)) for seen in ("residual", "keys")]
    said.append(repr(preimage.capture(model, [[5]], 1, observe=Observation("kv", "before"))))
    assert said == [
        "<states of 1 prompts at 1 layers, by LlamaForCausalLM>",
        "<keys of 1 prompts at 1 layers, by LlamaForCausalLM>",
        "<kv before rotary of 1 prompts at 1 layers, by LlamaForCausalLM>",
    ]


def test_layers_that_have_no_keys_are_left_out_or_refused() -> None:
    model = tiny("gpt2")
    assert preimage.capture(model, [[5]], observe="keys").layers == (1, 2, 3)
    assert preimage.capture(model, [[5]], "1-2", observe="mlp").layers == (1, 2)
    for layer in (0, "final", "0,1", [1, "final"]):
        assert (
            "has no values"
            in refused(
                OptionError, lambda layer=layer: preimage.capture(model, [[5]], layer, observe="values")
            ).message
        )
    refused(LayerError, lambda: preimage.capture(model, [[5]], 4, observe="keys"))
    refused(OptionError, lambda: preimage.capture(model, [[5]], 1, observe="queries"))
    with pytest.raises(TypeError):
        preimage.capture(model, [[5]], 1, observing="keys")  # type: ignore[call-arg]


def test_final_is_a_layer() -> None:
    model = tiny("gpt2")
    states = preimage.capture(model, [[5, 6]], 1, observe="final")
    assert (states.layers, states.observation) == (("final",), Observation())
    same_numbers(states, preimage.capture(model, [[5, 6]], "final"))
    wrapped = states_from(states.at(0, "final"), model, observe="final")
    assert (wrapped.layers, wrapped.observation) == (("final",), Observation())


def test_a_capture_of_something_else_is_not_continued(tmp_path: Path) -> None:
    model = tiny("llama")
    first = preimage.capture(model, PROMPTS, 2, observe="keys", out=tmp_path / "b")
    again = preimage.capture(model, PROMPTS, 2, observe="keys", out=tmp_path / "b")
    same_numbers(first, again)
    for other in ("values", Observation("keys", "before"), "residual"):
        error = refused(
            preimage.errors.BundleError,
            lambda other=other: preimage.capture(model, PROMPTS, 2, observe=other, out=tmp_path / "b"),
        )
        assert "already holds a bundle" in error.message


def test_blocks_of_different_widths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = preimage.load(build("llama"))
    monkeypatch.setattr(model, "width", lambda tap: 8 * tap.block)
    error = refused(OptionError, lambda: preimage.capture(model, [[5]], [1, 2], observe="keys"))
    assert "1: 8, 2: 16" in error.message


def test_widths_are_those_of_the_site(tmp_path: Path) -> None:
    model, keys = tiny("llama"), torch.randn(2, 5, 16)
    states = States.from_tensor(keys, 2, model, observation=Observation("keys"))
    assert (states.d_model, states.observation) == (16, Observation("keys"))
    error = refused(StatesError, lambda: States.from_tensor(keys, 2, model))
    assert "16 wide, those of LlamaForCausalLM are 32" in error.message
    error = refused(StatesError, lambda: States.from_tensor(keys, 2, model, observation=Observation("kv")))
    assert "16 wide, those of LlamaForCausalLM are 32" in error.message
    refused(OptionError, lambda: States.from_tensor(keys, 0, model, observation=Observation("keys")))
    assert States.from_tensor(keys, 2).fingerprint(2) != states.fingerprint(2)
    values = States.from_tensor(keys, 2, observation=Observation("values"))
    assert values.fingerprint(2) != states.fingerprint(2)


def test_geometry_of_keys_is_not_taken_for_that_of_the_stream() -> None:
    states = preimage.capture(tiny("llama"), [[5, 6], [7, 8]], 2, observe="keys")
    assert "are keys" in refused(OptionError, lambda: preimage.measure_geometry(states)).message


@pytest.mark.parametrize("name", NAMES)
def test_every_site_has_a_noise_floor(name: str) -> None:
    model = tiny(name)
    sites = [Site(block, place, rotary) for block in (1, 3) for place, rotary in PLACES]
    for noise in noise_of(model, sites).values():
        assert 0 < noise.relative < 1e-4
        assert noise.absolute < 1e-3 * noise.longest
    assert noise_floor(model, sites[0]) == {sites[0]: noise_of(model, sites)[sites[0]].relative}


def test_noise_of_layers_is_the_same_whatever_sites_were_measured() -> None:
    one, other = preimage.load(build("llama")), preimage.load(build("llama"))
    sites = [Site(3, "mlp"), Site(1, "keys")]
    noise_of(one, sites)
    assert noise_of(one, "all") == noise_of(other, "all")
    assert noise_of(one, sites) == noise_of(other, sites)
    assert list(noise_of(one, sites)) == sites


@pytest.fixture
def lasting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    return preimage.load(str(make_folder(tmp_path / "model")), device="cpu")


def test_noise_of_sites_is_kept_beside_that_of_layers(
    lasting: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = [Site(1, "keys"), Site(1, "kv", "before")]
    layers, sites = noise_of(lasting, "all"), noise_of(lasting, taps)
    path = noise_module._cache_file(lasting)
    saved = json.loads(path.read_text())
    assert set(saved) == {*map(str, layers), "1.keys", "1.kv-before-rotary"}
    monkeypatch.setattr(noise_module, "measure_noise", lambda *_: pytest.fail("it was measured"))
    noise_module._measured.clear()
    assert noise_of(lasting, taps) == sites
    assert noise_of(lasting, "all") == layers


@pytest.mark.parametrize(
    "content", ['{"1.keys.x": 3}', '{"one.keys": [1, 1, 1]}', "[]", '{"1.keys": [0.1]}', "{"]
)
def test_a_damaged_cache_of_noise_costs_time_alone(lasting: LanguageModel, content: str) -> None:
    path = noise_module._cache_file(lasting)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert 0 < noise_floor(lasting, Site(1, "keys"))[Site(1, "keys")] < 1e-4
    assert 0 < noise_floor(lasting, 1)[1] < 1e-4


def test_a_bundle_of_keys_says_so_before_anything_is_read(tmp_path: Path) -> None:
    folder = preimage.capture(tiny("gpt2"), [random_ids(4)], 2, observe="keys").save(tmp_path / "b")
    manifest = manifest_of(folder)
    assert (manifest["schema"], manifest["d_model"], manifest["layers"]) == ("preimage/9", 32, [2])
    del manifest["observation"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert preimage.open_states(folder).observation == Observation()
