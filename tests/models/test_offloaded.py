"""Models that accelerate spread over memory and disk are the same models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import preimage
from preimage.errors import MissingExtraError, ModelError, OptionError
from preimage.layers import Layer
from preimage.models import LanguageModel, double_copy, draw_by_block
from preimage.observations import Observation, Site
from preimage.preparation import Preparation
from support.refusing import refused
from support.tiny import build, random_ids

accelerate = pytest.importorskip("accelerate", reason="accelerate is not there; run `make setup`")

PROMPTS = [random_ids(9, seed) for seed in range(2)]
IDS = torch.tensor(PROMPTS)
LAYERS: tuple[Layer, ...] = (0, 1, 2, 3, "final")
SITES = [Site(2, kind) for kind in ("keys", "values", "kv", "attention", "mlp")] + [Site(2, "keys", "before")]
PLACES = ("cpu", "disk", "cpu")  # of the three blocks
MAPS = {
    "llama": {
        "model.embed_tokens": "disk", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk",
        **{f"model.layers.{index}": place for index, place in enumerate(PLACES)},
    },
    "gpt2": {
        "transformer.wte": "disk", "transformer.wpe": "cpu", "transformer.ln_f": "cpu", "lm_head": "disk",
        **{f"transformer.h.{index}": place for index, place in enumerate(PLACES)},
    },
}  # fmt: skip


@pytest.fixture(params=["llama", "llama tied", "gpt2"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A model's folder, and where its parts are to be; gpt2 ties its head to its embeddings."""
    name, _, tied = request.param.partition(" ")
    changes = {"tie_word_embeddings": True} if tied else {}
    build(name, **changes, initializer_range=0.2).save_pretrained(tmp_path / "m")
    return tmp_path / "m", MAPS[name]


@pytest.fixture
def pair(saved: tuple[Path, dict[str, str]]) -> tuple[LanguageModel, LanguageModel]:
    """The model in memory, and spread."""
    folder, places = saved
    return preimage.load(folder, device="cpu"), preimage.load(folder, device_map=places)


def on_meta(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.is_meta}


# --- the same model ---------------------------------------------------------------------------


def test_states_are_the_same_to_the_bit(pair: tuple[LanguageModel, LanguageModel]) -> None:
    plain, spread = pair
    away = on_meta(spread.module)
    assert any("embed" in name or "wte" in name for name in away)
    assert any(".1." in name for name in away)
    assert not any(".0." in name for name in away)
    assert (spread.device, spread.dtype) == (plain.device, plain.dtype)
    assert repr(spread) == repr(plain)
    expected, found = plain.states(IDS, LAYERS), spread.states(IDS, LAYERS)
    for layer in LAYERS:
        assert torch.equal(expected[layer], found[layer])
    for layer in LAYERS[2:]:
        assert torch.equal(spread.lift(found[1], 1, layer), expected[layer])
    assert on_meta(spread.module) >= away  # nothing stays behind


def test_what_is_seen_inside_blocks_is_the_same(pair: tuple[LanguageModel, LanguageModel]) -> None:
    plain, spread = pair
    expected, found = plain.states(IDS, SITES), spread.states(IDS, SITES)
    for site in SITES:
        assert torch.equal(expected[site], found[site])
        assert plain.width(site) == spread.width(site)


def test_prefixes_are_the_same(pair: tuple[LanguageModel, LanguageModel]) -> None:
    (one, other) = (model.prefix("final") for model in pair)
    assert torch.equal(one.extend(IDS[0]), other.extend(IDS[0]))
    assert torch.equal(one.try_tokens(torch.arange(20)), other.try_tokens(torch.arange(20)))
    positions, tokens = torch.tensor([2, 5]), torch.tensor([7, 8])
    assert torch.equal(one.try_at(positions, tokens), other.try_at(positions, tokens))


def test_gradients_are_the_same(pair: tuple[LanguageModel, LanguageModel]) -> None:
    gradients = []
    for model in pair:
        embedded = model.embed(IDS[0, :1]).clone().requires_grad_()
        model.states(IDS, LAYERS)  # an inference pass leaves nothing that a gradient cannot go through
        model.prefix(3).try_embeddings(embedded).square().sum().backward()
        gradients.append(embedded.grad)
    assert gradients[0] is not None
    assert torch.equal(*gradients)


def test_identity_and_tables_are_the_same(pair: tuple[LanguageModel, LanguageModel]) -> None:
    plain, spread = pair
    assert spread.identity == plain.identity
    assert torch.equal(spread.embedding_table, plain.embedding_table)
    assert spread.unembedding is not None
    assert plain.unembedding is not None
    assert torch.equal(spread.unembedding, plain.unembedding)
    assert spread.lasting
    edition = spread.edition
    spread.states(IDS, ("final",))
    spread.states(IDS, (Site(2, "keys", "before"),))
    assert spread.edition == edition
    assert spread.unembedding is not None


def test_the_dtype_asked_for_is_the_one_read_from_the_disk(saved: tuple[Path, dict[str, str]]) -> None:
    folder, places = saved
    plain = preimage.load(folder, dtype="float64", device="cpu")
    spread = preimage.load(folder, dtype="float64", device_map=places)
    assert spread.dtype == torch.float64
    assert spread.identity == plain.identity


def test_copies_at_random_parameters_are_the_same(pair: tuple[LanguageModel, LanguageModel]) -> None:
    pair[1].states(IDS, ("final",))
    drawn = [draw_by_block(model, 1).states(IDS, LAYERS) for model in pair]
    for layer in LAYERS:
        assert torch.equal(drawn[0][layer], drawn[1][layer])
    assert torch.equal(*(model.states(IDS, ("final",))["final"] for model in pair))  # its hooks are back


def test_collisions_are_explained_as_ever(pair: tuple[LanguageModel, LanguageModel]) -> None:
    prompts = [[token, 3, 4] for token in range(8)]
    audits = [preimage.find_collisions(model, prompts).to_dict() for model in pair]
    assert audits[0]["layers"] == audits[1]["layers"]
    assert preimage.find_collisions(pair[1], prompts).unexplained == 0


# --- inversion --------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [2, "final"])
def test_prompts_are_recovered(layer: Layer, pair: tuple[LanguageModel, LanguageModel]) -> None:
    plain, spread = pair
    captured = preimage.capture(plain, PROMPTS, layer)
    for model, states in ((spread, captured), (plain, spread.states(IDS, (layer,))[layer])):
        found = preimage.invert(model, states, layer)
        assert [(one.status, list(one.token_ids)) for one in found] == [("recovered", ids) for ids in PROMPTS]


@pytest.mark.parametrize("place", ["keys", "values", "kv"])
def test_prompts_are_recovered_from_keys_and_values(
    place: Any, pair: tuple[LanguageModel, LanguageModel]
) -> None:
    spread = pair[1]
    states = preimage.capture(spread, PROMPTS, 2, observe=Observation(place))
    found = preimage.invert(spread, states, 2)
    assert [(one.status, list(one.token_ids)) for one in found] == [("recovered", ids) for ids in PROMPTS]


def test_sipit_and_its_gradients_recover_prompts(pair: tuple[LanguageModel, LanguageModel]) -> None:
    spread = pair[1]
    [found] = preimage.invert(spread, preimage.capture(spread, PROMPTS[:1], 3), 3, method="sipit")
    assert (found.status, list(found.token_ids)) == ("recovered", PROMPTS[0])


# --- modules spread elsewhere -----------------------------------------------------------------


def spread_by_transformers(folder: Path, places: dict[str, str]) -> nn.Module:
    module: nn.Module = AutoModelForCausalLM.from_pretrained(folder, device_map=places, dtype=torch.float32)
    return module


def spread_from_memory(folder: Path, _: dict[str, str]) -> nn.Module:
    module: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return accelerate.cpu_offload(module, torch.device("cpu"))  # type: ignore[no-any-return]


def spread_into_a_folder(folder: Path, _: dict[str, str]) -> nn.Module:
    module: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accelerate.disk_offload(module, str(folder / "away"), torch.device("cpu"))
    return module


@pytest.mark.parametrize("spreading", [spread_by_transformers, spread_from_memory, spread_into_a_folder])
def test_a_module_that_was_spread_is_the_same_model(
    spreading: Any, saved: tuple[Path, dict[str, str]]
) -> None:
    plain, spread = preimage.load(saved[0], device="cpu"), preimage.load(spreading(*saved))
    assert on_meta(spread.module)
    assert spread.identity.weight_hash == plain.identity.weight_hash
    assert torch.equal(spread.states(IDS, ("final",))["final"], plain.states(IDS, ("final",))["final"])
    assert torch.equal(spread.embedding_table, plain.embedding_table)
    [found, _] = preimage.invert(spread, preimage.capture(plain, PROMPTS, 2), 2)
    assert (found.status, list(found.token_ids)) == ("recovered", PROMPTS[0])


# --- not the same model -----------------------------------------------------------------------


def change_file(folder: Path, ending: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    [name] = [name for name in tensors if name.endswith(ending)]
    tensors[name][3, 2] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("ending", [("layers.1.self_attn.q_proj.weight", "h.1.attn.c_attn.weight"),
                                    ("embed_tokens.weight", "wte.weight")])  # fmt: skip
def test_a_changed_file_is_another_model(ending: tuple[str, str], saved: tuple[Path, dict[str, str]]) -> None:
    folder, places = saved
    model = preimage.load(folder, device_map=places)
    before, edition, table = model.identity.weight_hash, model.edition, model.embedding_table
    change_file(folder, ending["gpt2" in json.loads((folder / "config.json").read_text())["model_type"]])
    assert model.edition > edition
    assert model.identity.weight_hash == preimage.load(folder, device="cpu").identity.weight_hash != before
    assert torch.equal(model.embedding_table, table) == ("attn" in ending[0])


@pytest.mark.parametrize("index", [0, 12])
def test_a_changed_tensor_in_memory_is_another_model(index: int, saved: tuple[Path, dict[str, str]]) -> None:
    model = preimage.load(spread_from_memory(*saved))
    before, edition = model.identity.weight_hash, model.edition
    name = list(dict(model.anatomy.backbone.named_parameters()))[index]
    part = model.anatomy.backbone.get_submodule(name.rpartition(".")[0])
    with torch.no_grad():
        part._hf_hook.weights_map[name.rpartition(".")[2]].add_(1)  # type: ignore[union-attr]
    assert model.edition > edition
    assert model.identity.weight_hash != before


def test_a_replaced_forward_is_seen_through_the_hooks(saved: tuple[Path, dict[str, str]]) -> None:
    model = preimage.load(saved[0], device_map=saved[1])
    edition, block = model.edition, model.anatomy.blocks[1]
    own: Any = block._old_forward
    block._old_forward = lambda *args, **kwargs: own(*args, **kwargs)
    assert not model.lasting
    assert model.edition > edition


def test_a_hook_that_does_more_than_move_tensors_is_an_alteration(saved: tuple[Path, dict[str, str]]) -> None:
    model = preimage.load(saved[0], device_map=saved[1])

    class Doubled(accelerate.hooks.ModelHook):  # type: ignore[misc,name-defined]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output

    accelerate.hooks.add_hook_to_module(model.anatomy.blocks[1], Doubled(), append=True)
    assert not model.lasting


# --- refusals ---------------------------------------------------------------------------------


def test_copies_of_it_are_refused(pair: tuple[LanguageModel, LanguageModel]) -> None:
    error = refused(ModelError, lambda: double_copy(pair[1]))
    assert "has weights outside its devices" in error.message
    assert error.hint == "Load it without device_map."


def test_weights_on_meta_that_nothing_brings_in_are_refused() -> None:
    with torch.device("meta"):
        module = build("llama")
    error = refused(ModelError, lambda: preimage.load(module))
    assert "are on the meta device" in error.message


def test_a_device_beside_a_device_map_is_refused(folder: Path) -> None:
    error = refused(OptionError, lambda: preimage.load(folder, device="cpu", device_map="auto"))
    assert error.message == "device cpu and a device map were given."
    refused(OptionError, lambda: Preparation(str(folder), device="cpu", device_map="auto"))


def test_an_unknown_device_map_is_refused_before_anything_is_loaded(folder: Path) -> None:
    error = refused(OptionError, lambda: preimage.load(folder, device_map="everywhere"))
    assert error.message == "Device map 'everywhere' is not known."
    refused(OptionError, lambda: Preparation(str(folder), device_map="everywhere"))


def test_a_gguf_file_is_not_spread(gguf_file: Path) -> None:
    error = refused(OptionError, lambda: preimage.load(gguf_file, device_map="auto"))
    assert "is a GGUF file" in error.message


def test_a_map_to_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    error = refused(ModelError, lambda: preimage.load(folder, device_map={"": "nowhere"}))
    assert "cannot be loaded" in error.message
    assert "the device map" in error.hint


def test_without_accelerate_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preimage.models.locating.find_spec", lambda _: None)
    error = refused(MissingExtraError, lambda: preimage.load(folder, device_map="auto"))
    assert error.hint == "Install it: pip install accelerate"


def test_auto_is_the_plain_model_where_it_fits(folder: Path) -> None:
    assert preimage.load(folder, device_map="auto").identity == preimage.load(folder).identity
    assert "accelerate" in sys.modules
