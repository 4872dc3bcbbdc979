"""Bundles on disk: the bits come back, and everything that damages them is named."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import preimage
from preimage.errors import BundleError, LayerError, PromptError, StatesError
from preimage.models import LanguageModel
from preimage.states import States
from support.bundles import LAYERS, LENGTHS, MANIFEST, PROMPTS, TENSORS, manifest_of, same_numbers, sha
from support.refusing import refused
from support.tiny import build, random_ids, tiny


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, LanguageModel]:
    return {torch.float32: tiny("llama"), torch.bfloat16: preimage.load(build("llama", dtype=torch.bfloat16))}


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bundle_gives_back_the_bits_the_model_computed(
    models: dict[torch.dtype, LanguageModel], dtype: torch.dtype, positions: str, tmp_path: Path
) -> None:
    model = models[dtype]
    states = preimage.capture(model, PROMPTS, LAYERS, positions=positions)
    opened = preimage.open_states(states.save(tmp_path / "b"))
    same_numbers(opened, states)
    assert opened.layers == (0, 2, "final")
    assert opened.dtype == dtype
    assert opened.positions == positions
    assert opened.lengths == LENGTHS
    assert opened.token_ids == tuple(map(tuple, PROMPTS))
    assert opened.model == model.identity.to_dict()
    assert opened.noise_floor == states.noise_floor
    assert set(opened.noise_floor) == {0, 2, "final"}
    opened.require_made_by(model)
    last = {layer: opened.last(layer) for layer in opened.layers}
    for prompt, ids in enumerate(PROMPTS):
        for layer, direct in model.states(torch.tensor([ids]), opened.layers).items():
            kept = direct[0] if positions == "all" else direct[0, -1:]
            assert torch.equal(opened.at(prompt, layer), kept)
            assert torch.equal(last[layer][prompt], direct[0, -1])
            assert last[layer].dtype == dtype


def test_the_manifest_says_everything_but_the_numbers(bundle: Path) -> None:
    model, manifest = tiny("llama"), manifest_of(bundle)
    assert sorted(path.name for path in bundle.iterdir()) == [MANIFEST, TENSORS]
    assert manifest["schema"] == "preimage/9"
    assert manifest["kind"] == "states"
    assert manifest["model"] == model.identity.to_dict()
    assert len(manifest["model"]["weight_hash"]) == 64
    assert manifest["dtype"] == "float32"
    assert manifest["layer_convention"].startswith("0 = input of block 1; k = raw output of block k;")
    assert manifest["layers"] == LAYERS
    assert manifest["observation"] == preimage.Observation().where
    assert manifest["positions"] == "all"
    assert manifest["d_model"] == 32
    assert manifest["token_ids"] == PROMPTS
    assert all(0 < value < 1e-3 for value in manifest["noise_floor"].values())
    assert manifest["checksums"] == {TENSORS: sha(bundle / TENSORS)}
    assert manifest["bytes"] == (bundle / TENSORS).stat().st_size
    tensors = load_file(bundle / TENSORS)  # plain safetensors, readable without preimage
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        f"layer.{layer}.group.{number}": (rows, length, 32)
        for layer in LAYERS
        for number, (length, rows) in enumerate([(1, 1), (2, 2), (5, 3), (9, 1), (17, 1)])
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_withheld_ids_are_nowhere_in_the_bundle(streamed: bool, tmp_path: Path) -> None:
    model, folder = tiny("llama"), tmp_path / "b"
    if streamed:
        preimage.capture(model, PROMPTS, LAYERS, out=folder, withhold_ids=True)
    else:
        preimage.capture(model, PROMPTS, LAYERS).save(folder, withhold_ids=True)
    assert {path.name for path in folder.iterdir()} - {"record.jsonl"} == {MANIFEST, TENSORS}
    if streamed:  # a command may hold the text
        assert json.loads((folder / "record.jsonl").read_text())["command"] is None
    assert manifest_of(folder)["token_ids"] is None
    opened = preimage.open_states(folder)
    assert opened.token_ids is None
    assert opened.lengths == LENGTHS
    same_numbers(opened, preimage.capture(model, PROMPTS, LAYERS))


def test_one_list_of_ids_and_one_layer(tmp_path: Path) -> None:
    states = preimage.capture(tiny("gpt2"), random_ids(4), 1, out=tmp_path / "b")
    assert (len(states), states.layers, states.lengths) == (1, (1,), (4,))


def test_wrong_questions_name_what_there_is(bundle: Path) -> None:
    states = preimage.open_states(bundle)
    error = refused(LayerError, lambda: states.at(0, 1))
    assert error.message == "Layer 1 was not captured."
    assert error.hint == "These states hold layer 0, 2, final."
    refused(LayerError, lambda: states.last(3))
    error = refused(StatesError, lambda: states.at(8, 0))
    assert str(error) == "There is no prompt 8. These states hold prompts 0..7."


# --- damage -----------------------------------------------------------------------------------


def test_no_bundle_and_no_folder(tmp_path: Path) -> None:
    error = refused(BundleError, lambda: preimage.open_states(tmp_path / "none"))
    assert error.message == f"{tmp_path / 'none'} is not a state bundle: no manifest.json in it."
    assert "preimage capture --out" in error.hint
    refused(BundleError, lambda: preimage.open_states(tmp_path))


def test_a_missing_tensor_file_is_named(bundle: Path) -> None:
    (bundle / TENSORS).unlink()
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert f"{bundle / TENSORS} is missing" in error.message


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_tensor_file_is_named(left: int, verify: bool, bundle: Path) -> None:
    whole = (bundle / TENSORS).stat().st_size
    os.truncate(bundle / TENSORS, left % whole)
    error = refused(BundleError, lambda: preimage.open_states(bundle, verify=verify))
    assert f"{bundle / TENSORS} has {left % whole} bytes, {whole} were written" in error.message


@pytest.mark.parametrize("where", [9, 0.5, -1])
def test_one_flipped_bit_fails_the_checksum_by_name(where: float, bundle: Path) -> None:
    path = bundle / TENSORS
    data = bytearray(path.read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 1
    path.write_bytes(data)
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert error.message == f"{path} fails its checksum."


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"3", b'"schema"', b"\xff\xfe", b"[" * 100_000, b'{"schema": "preimage/9"}'],
    ids=["empty", "open", "list", "null", "number", "text", "bytes", "deep", "bare"],
)
def test_a_manifest_that_is_none_is_refused(raw: bytes, bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(raw)
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert f"{bundle / MANIFEST} cannot be used" in error.message


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema": lambda m: m.update(schema="preimage/10"),
    "no schema": lambda m: m.pop("schema"),
    "no bytes": lambda m: m.pop("bytes"),
    "no checksums": lambda m: m.pop("checksums"),
    "empty checksums": lambda m: m.update(checksums={}),
    "checksums of a kind": lambda m: m.update(checksums=[1]),
    "no model": lambda m: m.pop("model"),
    "empty model": lambda m: m.update(model={}),
    "model is text": lambda m: m.update(model="smollm2"),
    "no ids": lambda m: m.pop("token_ids"),
    "too few ids": lambda m: m["token_ids"].pop(),
    "shorter ids": lambda m: m["token_ids"][0].pop(),
    "ids are text": lambda m: m["token_ids"].__setitem__(0, "abcde"),
    "ids are no ints": lambda m: m["token_ids"].__setitem__(0, [0.5] * 5),
    "no groups": lambda m: m.pop("groups"),
    "prompt twice": lambda m: m["groups"][0].update(prompts=[0]),
    "prompt missing": lambda m: m["groups"].pop(),
    "other length": lambda m: m["groups"][0].update(length=2),
    "negative length": lambda m: m["groups"][0].update(length=-1),
    "other width": lambda m: m.update(d_model=31),
    "other layers": lambda m: m.update(layers=[0, 1, "final"]),
    "fewer layers": lambda m: m.update(layers=[0, 2]),
    "layer of a kind": lambda m: m.update(layers=["first", 2, "final"]),
    "other positions": lambda m: m.update(positions="some"),
    "last positions": lambda m: m.update(positions="last"),
    "other dtype": lambda m: m.update(dtype="float64"),
    "half of the same": lambda m: m.update(dtype="bfloat16"),
    "no dtype": lambda m: m.update(dtype="load"),
    "integer dtype": lambda m: m.update(dtype="int32"),
    "no floor": lambda m: m.pop("noise_floor"),
    "no place": lambda m: m.update(observation={}),
    "unknown place": lambda m: m.update(observation={"place": "queries", "rotary": "after"}),
    "place of a kind": lambda m: m.update(observation={"place": ["keys"], "rotary": "after"}),
    "place is text": lambda m: m.update(observation="keys"),
    "rotary of values": lambda m: m.update(observation={"place": "values", "rotary": "before"}),
    "keys of no block": lambda m: m.update(observation={"place": "keys", "rotary": "after"}),
    "final is a layer": lambda m: m.update(observation={"place": "final", "rotary": "after"}),
    "floor is text": lambda m: m["noise_floor"].update({"0": "low"}),
    "infinite floor": lambda m: m["noise_floor"].update({"0": float("inf")}),
    "floor is NaN": lambda m: m["noise_floor"].update({"0": float("nan")}),
    "negative floor": lambda m: m["noise_floor"].update({"0": -1.0}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_disagrees_is_refused(
    change: Callable[[dict[str, Any]], object], bundle: Path
) -> None:
    manifest = manifest_of(bundle)
    original = copy.deepcopy(manifest)
    change(manifest)
    assert manifest != original
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert str(bundle) in error.message
    assert "again" in error.hint


def test_the_schema_that_was_found_and_the_one_wanted_are_named(bundle: Path) -> None:
    manifest = manifest_of(bundle) | {"schema": "preimage/10"}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert "its schema is 'preimage/10', not 'preimage/9'" in error.message


def test_a_bundle_of_the_version_before_is_read_as_it_is(bundle: Path) -> None:
    now = preimage.open_states(bundle)
    (bundle / MANIFEST).write_text(json.dumps(manifest_of(bundle) | {"schema": "preimage/4"}))
    before = preimage.open_states(bundle)
    assert before.observation == now.observation
    assert before.layers == now.layers


@pytest.mark.parametrize("schema", ["preimage/1", "preimage/2", "preimage/3"])
def test_bundles_of_the_versions_before_are_still_read(schema: str, bundle: Path) -> None:
    manifest = manifest_of(bundle) | {"schema": schema}
    del manifest["observation"]
    if schema == "preimage/1":
        manifest["model"]["checkpoint"] = manifest["model"].pop("files_hash")
    now = preimage.open_states(bundle)
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    before = preimage.open_states(bundle)
    assert (before.model, before.observation) == (now.model, preimage.Observation())
    same_numbers(before, now)


def test_states_of_another_model_or_width_are_refused(bundle: Path) -> None:
    states, other = preimage.open_states(bundle), tiny("llama", seed=1)
    states.require_made_by(tiny("llama"))
    states.require_width(other)
    error = refused(BundleError, lambda: states.require_made_by(other))
    ours, theirs = (model.identity.weight_hash[:12] for model in (other, tiny("llama")))
    assert "were made by LlamaForCausalLM" in error.message
    assert ours in error.message
    assert theirs in error.message
    wide = preimage.load(build("gpt2", n_embd=64))
    for refuse in (states.require_width, states.require_made_by):
        error = refused(StatesError, lambda refuse=refuse: refuse(wide))
        assert "32 wide, those of GPT2LMHeadModel are 64" in error.message


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # computed positions, and a table of them
def test_more_positions_than_the_model_has_are_refused_before_any_work(architecture: str) -> None:
    model = preimage.load(build(architecture))
    refused(PromptError, lambda: preimage.capture(model, [[5] * 129]))
    long = torch.randn(2, 129, 32)
    message = f"Prompt 0 has 129 positions; {model.name} takes at most 128."
    for work in (
        lambda: preimage.invert(model, long, layer=1),
        lambda: preimage.invert(model, States.from_tensor(long, 1), method="sipit"),
        lambda: States.from_tensor(long, 1, model),
        lambda: States.from_tensor(long, 1).require_made_by(model),
    ):
        assert refused(StatesError, work).message == message
    refused(PromptError, lambda: preimage.find_collisions(model, [[5] * 129, [6] * 129]))
    assert model.forward_tokens == 0


def test_states_of_another_dtype_say_which_to_load(bundle: Path) -> None:
    half = preimage.load(build("llama", dtype=torch.bfloat16))
    error = refused(BundleError, lambda: preimage.open_states(bundle).require_made_by(half))
    assert "with dtype float32" in error.hint
