"""GGUF files: the states of the model they were made from, or a refusal in words."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch

import preimage
from preimage.errors import ModelError
from preimage.models import aliases, gguf_files, read_preview
from preimage.states import SAFETY
from support.folders import VOCABULARY, make_tokenizer
from support.gguf_files import write_gguf
from support.refusing import refused
from support.tiny import build, random_ids


def test_a_gguf_file_gives_the_states_of_the_model_it_was_made_from(gguf_file: Path) -> None:
    original = preimage.load(build("llama", vocab_size=VOCABULARY, tie_word_embeddings=False))
    model = preimage.load(gguf_file)
    assert model.name == str(gguf_file)
    assert (model.n_layers, model.d_model, model.vocab_size, model.max_length) == (3, 32, VOCABULARY, 128)
    ids = [random_ids(length, length, VOCABULARY) for length in (1, 17, 64)]
    ours, theirs = preimage.capture(model, ids), preimage.capture(original, ids)
    for layer in ours.layers:
        for prompt in range(len(ids)):
            difference = (ours.at(prompt, layer) - theirs.at(prompt, layer)).norm(dim=-1)
            noise = SAFETY * ours.noise_floor[layer]
            assert (difference <= noise * theirs.at(prompt, layer).norm(dim=-1)).all()
    text = "for the cat é\n  x"
    assert model.tokenizer(text)["input_ids"] == make_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert model.decode(model.tokenizer(text)["input_ids"]) == text
    assert preimage.load(str(gguf_file), dtype="bfloat16").dtype == torch.bfloat16
    assert read_preview(str(gguf_file)) is None


def test_a_missing_gguf(tmp_path: Path) -> None:
    error = refused(ModelError, lambda: preimage.load(tmp_path / "none.gguf"))
    assert str(error) == f"There is no file {tmp_path / 'none.gguf'}. Check the path."
    refused(ModelError, lambda: preimage.load(str(tmp_path / "none.GGUF")))


@pytest.mark.parametrize("raw", [b"", b"GG", b"ggml and more", b"PK\x03\x04"])
def test_a_file_that_is_only_called_gguf(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    error = refused(ModelError, lambda: preimage.load(path))
    assert error.message == f"{path} is not a GGUF file."


@pytest.mark.parametrize("left", [4, 24, 1000, 0.5, -10])
def test_a_truncated_gguf_is_refused(left: float, gguf_file: Path) -> None:
    size = gguf_file.stat().st_size
    os.truncate(gguf_file, int(left * size) if isinstance(left, float) else left % size)
    error = refused(ModelError, lambda: preimage.load(gguf_file))
    assert f"{gguf_file} cannot be read as a GGUF model" in error.message


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<IQQ", 3, 2**60, 2**60),
        struct.pack("<IQQQ", 3, 1, 1, 2**60) + bytes(40),
        struct.pack("<IQQ", 2**31, 0, 0),
        struct.pack("<IQQ", 3, 0, 0),
    ],
    ids=["counts", "string", "version", "empty"],
)
def test_a_hostile_gguf_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + raw)
    error = refused(ModelError, lambda: preimage.load(path))
    assert f"{path} cannot be read as a GGUF model" in error.message


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("feed_forward_length", 96),
        ("feed_forward_length", 2**31),
        ("block_count", 2**31),
        ("block_count", 0),
        ("rope.dimension_count", 2**31),  # no layer has it, and rotary frequencies would take gigabytes
    ],
)
def test_a_gguf_of_other_sizes_than_it_says_is_refused(
    name: str, size: int, gguf_file: Path, tmp_path: Path
) -> None:
    raw = bytearray(gguf_file.read_bytes())
    at = raw.index(name.encode()) + len(name) + 4  # behind the type of the number
    raw[at : at + 4] = size.to_bytes(4, "little")
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    error = refused(ModelError, lambda: preimage.load(path))
    assert f"{path} cannot be read as a GGUF model" in error.message


def test_a_gguf_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    module = build("llama", vocab_size=VOCABULARY)
    path = write_gguf(tmp_path / "m.gguf", module, make_tokenizer(), skip="ffn_up")
    error = refused(ModelError, lambda: preimage.load(path))
    assert "lacks weights the model needs, 'model.layers.0.mlp.up_proj.weight' first" in error.message


def test_a_gguf_file_is_converted_once(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    first = preimage.load(gguf_file)
    (folder,) = (tmp_path / "cache" / "models").iterdir()  # and nothing half-made beside it
    with monkeypatch.context() as patched:
        patched.setattr(gguf_files, "read_gguf", lambda *_: pytest.fail("the file was read again"))
        again = preimage.load(gguf_file)
    assert again.identity == first.identity
    assert again.tokenizer("a cat")["input_ids"] == first.tokenizer("a cat")["input_ids"]
    monkeypatch.setattr(aliases, "_LARGEST", 0)  # what is large is read every time, and gives the same
    assert preimage.load(gguf_file).identity.weight_hash == first.identity.weight_hash
    assert list((tmp_path / "cache" / "models").iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_costs_time_alone(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    assert preimage.load(gguf_file).n_layers == 3
