"""Loading a model: from a folder or an object, and refused in words where it cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import preimage
from preimage.errors import ModelError, OptionError, clip
from preimage.models import locate, read_preview
from support.folders import VOCABULARY, make_folder, make_tokenizer
from support.model_files import rewrite, same_weights
from support.refusing import refused
from support.tiny import build

# --- folders and objects ----------------------------------------------------------------------


def test_a_folder_gives_the_weights_that_were_saved(folder: Path) -> None:
    original = build("llama", vocab_size=VOCABULARY)
    model = preimage.load(str(folder))
    same_weights(original, model.module)
    assert model.name == str(folder)
    assert model.revision is None
    assert model.device == torch.device("cpu")
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert not model.module.training
    assert (model.n_layers, model.d_model, model.vocab_size, model.max_length) == (3, 32, VOCABULARY, 128)
    ids = make_tokenizer()("some text")["input_ids"]
    assert model.tokenizer("some text")["input_ids"] == ids
    assert model.decode(ids) == "<s>some text"
    assert model.identity.weight_hash == preimage.load(original).identity.weight_hash


def test_a_folder_without_a_tokenizer_works_with_ids(tmp_path: Path) -> None:
    model = preimage.load(make_folder(tmp_path / "m", tokenizer=False))  # a Path will do
    assert model.tokenizer is None
    assert model.decode([1, 2]) is None
    assert len(preimage.capture(model, [[1, 2, 3]], 1)) == 1
    with pytest.raises(preimage.PreimageError, match="is text, and this model has no tokenizer"):
        preimage.capture(model, ["text"], 1)
    given = make_tokenizer()
    assert preimage.load(tmp_path / "m", tokenizer=given).tokenizer is given


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_the_dtype_is_the_one_asked_for_whatever_the_checkpoint_says(name: str, tmp_path: Path) -> None:
    original = build("llama", dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    assert preimage.load(tmp_path / "m").dtype == torch.float32  # the default
    dtype = getattr(torch, name)
    for asked in (name, dtype):
        model = preimage.load(tmp_path / "m", dtype=asked)
        same_weights(original, model.module, dtype)
        assert model.dtype == dtype
    assert model.identity.dtype == name


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("fp32", "float32"),
        ("fp64", "float64"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
    ],
)
def test_a_dtype_has_short_names(short: str, name: str, folder: Path) -> None:
    model = preimage.load(folder, dtype=short)
    assert model.dtype == getattr(torch, name)
    assert model.identity == preimage.load(folder, dtype=name).identity


def test_auto_is_the_dtype_that_the_config_names(folder: Path, gguf_file: Path) -> None:
    assert preimage.load(folder, dtype="auto").dtype == torch.float32
    for change in ({"dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}):
        rewrite(folder, **change)
        model = preimage.load(folder, dtype="auto")
        assert model.dtype == torch.bfloat16
        assert "torch.bfloat16" in repr(model)
    rewrite(folder, dtype=None, torch_dtype=None)
    assert preimage.load(folder, dtype="auto").dtype == torch.float32
    rewrite(folder, text_config={"dtype": "float16"})
    assert locate(str(folder)).dtype == "float16"
    assert preimage.load(gguf_file, dtype="auto").dtype == torch.float32
    rewrite(folder, dtype="float8_e4m3fn")
    error = refused(ModelError, lambda: preimage.load(folder, dtype="auto"))
    assert error.message.endswith(
        "config.json names the dtype 'float8_e4m3fn', in which models are not loaded."
    )


def test_an_object_in_memory_is_taken_as_it_is() -> None:
    module = build("gpt2", dtype=torch.bfloat16)
    module.train()
    tokenizer = make_tokenizer()
    model = preimage.load(module, tokenizer=tokenizer, dtype="float32", revision="r1")
    assert model.module is module
    assert model.tokenizer is tokenizer
    assert model.dtype == torch.bfloat16
    assert not module.training
    assert (model.name, model.revision) == ("GPT2LMHeadModel", "r1")
    assert preimage.load(model) is model
    module.config.name_or_path = "mine"
    assert preimage.load(module).name == "mine"


def test_missing_weights_are_refused_instead_of_invented(folder: Path) -> None:
    rewrite(folder, num_hidden_layers=5)
    error = refused(ModelError, lambda: preimage.load(folder))
    assert "lacks 18 weights its config.json asks for, 'model.layers.3" in error.message
    rewrite(folder, num_hidden_layers=3)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = refused(ModelError, lambda: preimage.load(folder))
    assert "lacks 1 weights" in error.message
    assert "'model.norm.weight' first" in error.message


def test_a_model_saved_without_its_head_is_the_same_model(tmp_path: Path) -> None:
    module = build("llama", tie_word_embeddings=False)
    module.model.save_pretrained(tmp_path / "m")
    assert preimage.load(tmp_path / "m").identity.weight_hash == preimage.load(module).identity.weight_hash


def test_a_sharded_folder_loads(tmp_path: Path) -> None:
    module = build("llama")
    module.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    same_weights(module, preimage.load(tmp_path / "m").module)
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{")
    error = refused(ModelError, lambda: preimage.load(tmp_path / "m"))
    assert "model.safetensors.index.json cannot be read as an index of weights" in error.message


# --- names and options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("smollm3", "and not in the hub's cache (offline)."),
        ("no/such-model", "and not in the hub's cache (offline)."),
        ("./no/such/folder", "and not a hub id."),
        ("two words", "and not a hub id."),
        ("a\0b", "and not a hub id."),
        ("\ud800", "and not a hub id."),
        ("x" * 5000, "and not a hub id."),
    ],
)
def test_an_unknown_name_says_what_was_tried(name: str, ending: str) -> None:
    with pytest.raises(ModelError) as caught:  # as long as the name is
        preimage.load(name)
    error = caught.value
    assert type(error) is ModelError
    assert "\n" not in str(error)
    assert error.message.startswith(f"{clip(repr(name))} is not an alias (smollm2), no file or folder here")
    assert error.message.endswith(ending)
    assert "preimage models" in error.hint
    assert error.code == "bad_model"


def test_a_folder_without_config(tmp_path: Path) -> None:
    error = refused(ModelError, lambda: preimage.load(tmp_path))
    assert error.message == f"{tmp_path} has no config.json."


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    error = refused(ModelError, lambda: preimage.load(folder))
    assert error.message == f"{folder} holds no *.safetensors."


@pytest.mark.parametrize("raw", ["", "{", "[1]", "{}", '{"model_type": "no-such-type"}', '"text"'])
def test_a_corrupt_config_is_refused(raw: str, folder: Path) -> None:
    (folder / "config.json").write_text(raw)
    error = refused(ModelError, lambda: preimage.load(folder))
    assert f"{folder} cannot be loaded as a causal language model" in error.message
    assert "config.json" in error.hint
    assert read_preview(str(folder)) is None


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_truncated_weights_are_refused(left: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, left % path.stat().st_size)
    error = refused(ModelError, lambda: preimage.load(folder))
    assert f"{folder} cannot be loaded as a causal language model" in error.message


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    rewrite(folder, hidden_size=64)
    error = refused(ModelError, lambda: preimage.load(folder))
    assert f"{folder} cannot be loaded as a causal language model" in error.message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_corrupt_tokenizer_is_refused(name: str, folder: Path) -> None:
    (folder / name).write_text("{")
    error = refused(ModelError, lambda: preimage.load(folder))
    assert f"The tokenizer in {folder} cannot be loaded" in error.message


@pytest.mark.parametrize("dtype", ["float", "int8", "FLOAT32", "", torch.int64, torch.complex64])
def test_an_unknown_dtype_names_the_known(dtype: Any, folder: Path) -> None:
    error = refused(OptionError, lambda: preimage.load(folder, dtype=dtype))
    assert error.message == f"dtype {str(dtype)!r} is not known."
    known = "float32, fp32, float64, fp64, bfloat16, bf16, float16, fp16, half, auto"
    assert error.hint == f"Use one of {known}."


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "", "cpu:x"])
def test_an_unknown_device_is_refused(device: str, folder: Path) -> None:
    error = refused(OptionError, lambda: preimage.load(folder, device=device))
    assert error.message == f"Device {device!r} cannot be used here."
    assert "auto, cpu" in error.hint


@pytest.mark.parametrize("layers", [10**9, 10**400], ids=["many", "more"])
def test_more_layers_than_tensors_are_refused_before_any_is_made(layers: int, folder: Path) -> None:
    rewrite(folder, num_hidden_layers=layers)
    error = refused(ModelError, lambda: preimage.load(folder))
    assert "layers, and the weights are" in error.message
