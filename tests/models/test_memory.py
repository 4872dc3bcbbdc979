"""What a model's weights take is known, and what does not fit is refused, before any of them is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import preimage
from preimage import devices
from preimage.errors import ModelError
from preimage.models import ModelFiles, locate, memory, weight_bytes
from support.refusing import refused

NUMBERS = 1000 * 3000 + 1000


def write_header(path: Path, **tensors: tuple[str, list[int], int]) -> None:
    """A safetensors file that ends behind its header; of each tensor the type, the shape and the bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [0, size]}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)


@pytest.fixture
def fake(tmp_path: Path) -> ModelFiles:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    write_header(tmp_path / "model.safetensors", a=("BF16", [1000, 3000], 6_000_000), b=("F32", [1000], 4000))
    return ModelFiles("fake", tmp_path, None)


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_weights_are_counted_in_the_dtype_they_are_loaded_in(dtype: str, size: int, fake: ModelFiles) -> None:
    assert weight_bytes(fake, dtype) == size * NUMBERS


def test_codes_are_loaded_as_they_are(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", a=("U8", [10], 10), b=("F8_E4M3", [7], 7), c=("F16", [1], 2))
    assert weight_bytes(ModelFiles("m", tmp_path, None), "float32") == 10 + 7 + 4


def test_only_the_files_that_are_loaded_count(fake: ModelFiles) -> None:
    whole = weight_bytes(fake, "float32")
    write_header(fake.path / "consolidated.safetensors", a=("F32", [5000], 20_000))
    assert weight_bytes(fake, "float32") == whole
    (fake.path / "model.safetensors").rename(fake.path / "one.safetensors")
    assert weight_bytes(fake, "float32") == 4 * (NUMBERS + 5000)  # no file of the usual name: all of them
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (fake.path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(fake, "float32") == whole


def test_files_that_do_not_tell_are_left_to_loading(fake: ModelFiles, gguf_file: Path) -> None:
    assert weight_bytes(locate(str(gguf_file)), "float32") is None
    for broken in (b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a": 1}'):
        (fake.path / "model.safetensors").write_bytes(broken)
        assert weight_bytes(fake, "float32") is None


def test_a_saved_model_takes_what_its_parameters_take(folder: Path) -> None:
    module = preimage.load(folder, dtype="bf16").module
    size = sum(parameter.nbytes for parameter in module.parameters())
    assert weight_bytes(locate(str(folder)), "bfloat16") == size


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    fake: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_GB", 10**6)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 7_000_000)
    for dtype in ("fp32", "float64"):
        error = refused(ModelError, lambda dtype=dtype: preimage.load(fake, dtype=dtype, device="cpu"))
        assert error.hint.startswith("Use --dtype bf16, or --device-map auto")
    assert error.message == "fake has 24.0 GB of weights in float64, and cpu has 7.0 GB free."
    error = refused(ModelError, lambda: preimage.load(fake, dtype="auto", device="cpu"))
    assert "cannot be loaded" in error.message  # they would fit: it was tried
    monkeypatch.setattr(memory, "free_bytes", lambda _: 5_000_000)
    error = refused(ModelError, lambda: preimage.load(fake, dtype="auto", device="cpu"))
    assert error.message == "fake has 6.0 GB of weights in bfloat16, and cpu has 5.0 GB free."
    assert error.hint.startswith("Use --device-map auto")


def test_large_weights_are_announced(
    fake: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "preimage")
    memory.require_room(fake, "float32", torch.device("cpu"))
    assert caplog.messages == []
    monkeypatch.setattr(memory, "_GB", 10**6)
    monkeypatch.setattr(memory, "_LARGE", 10**6)
    for free in (139_200_000, None):
        monkeypatch.setattr(memory, "free_bytes", lambda _, free=free: free)
        memory.require_room(fake, "bfloat16", torch.device("cuda"))
    memory.require_room(fake, "float32", None)
    assert caplog.messages == [
        "fake: 6.0 GB of weights in bfloat16 on cuda (139 GB there)",
        "fake: 6.0 GB of weights in bfloat16 on cuda",
        "fake: 12.0 GB of weights in float32 by device map",
    ]


def test_free_memory_is_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:  24 kB\nMemAvailable:     20 kB\nHugePages_Total:  0\n")
    monkeypatch.setattr(devices, "_MEMORY", told)
    assert devices.free_bytes(torch.device("cpu")) == 20 * 1024
    assert devices.free_bytes(torch.device("meta")) is None
    told.unlink()
    assert devices.free_bytes(torch.device("cpu")) is None
