"""Hostile safetensors (S4): refused cleanly, and without memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import preimage
from preimage.errors import BundleError, StatesError
from preimage.states import read_states_file
from support.bundles import TENSORS, exchange, npy
from support.refusing import refused


def tensor_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x01\x02\x03",
    "length alone": tensor_file(b""),
    "huge length": tensor_file({}, length=2**62),
    "largest length": tensor_file({}, length=2**64 - 1),
    "150 MB of header claimed": tensor_file({}, length=150_000_000),
    "90 MB of header claimed": tensor_file({}, length=90_000_000),
    "no json": tensor_file(b"this is not json"),
    "half a json": tensor_file(b'{"h": {"dtype": "F32", "sha'),
    "no utf-8": tensor_file(b'{"\xff\xfe": 1}'),
    "json of a kind": tensor_file([1, 2]),
    "deep json": tensor_file(b"[" * 200_000),
    "deep entry": tensor_file(b'{"h":' * 100_000),
    "overlapping": tensor_file({"a": entry(0, 8, [2, 1]), "b": entry(4, 12, [2, 1])}, bytes(12)),
    "same bytes twice": tensor_file({"a": entry(0, 8, [2, 1]), "b": entry(0, 8, [2, 1])}, bytes(8)),
    "beyond the file": tensor_file({"h": entry(0, 4096, [32, 32])}, bytes(16)),
    "far beyond the file": tensor_file({"h": entry(0, 2**62, [2**30, 2**30])}, bytes(16)),
    "hole": tensor_file({"a": entry(0, 4, [1, 1]), "b": entry(8, 12, [1, 1])}, bytes(12)),
    "left-over bytes": tensor_file({"h": entry(0, 4, [1, 1])}, bytes(400)),
    "backwards": tensor_file({"h": entry(8, 0, [2, 1])}, bytes(8)),
    "negative": tensor_file({"h": entry(-8, 0, [2, 1])}, bytes(8)),
    "shape too large": tensor_file({"h": entry(0, 8, [2**40, 2])}, bytes(8)),
    "shape overflows": tensor_file({"h": entry(0, 8, [2**62, 2**62, 4])}, bytes(8)),
    "negative shape": tensor_file({"h": entry(0, 8, [-2, -1])}, bytes(8)),
    "unknown type": tensor_file({"h": entry(0, 8, [2, 1], "Q7")}, bytes(8)),
    "name twice": tensor_file(
        b'{"h":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},'
        b'"h":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}',
        bytes(4),
    ),
}


def refused_at_length(action: Callable[[], object]) -> StatesError:
    """As ``refused``, with room for what safetensors itself says of a file."""
    with pytest.raises(StatesError) as caught:
        action()
    assert caught.value.hint
    assert len(caught.value.message) < 1000
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_hostile_safetensors_are_refused_cleanly(raw: bytes, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(raw)
    error = refused_at_length(lambda: read_states_file(path))
    assert f"{path} cannot be read as safetensors" in error.message
    exchange(bundle, raw)
    error = refused_at_length(lambda: preimage.open_states(bundle))
    assert str(bundle / TENSORS) in error.message


def test_tensors_of_another_kind_or_name_are_refused(bundle: Path, tmp_path: Path) -> None:
    tensors = load_file(bundle / TENSORS)
    name = "layer.2.group.1"
    for changed in (
        {name: tensors[name].to(torch.float64)},
        {name: tensors[name].to(torch.int32)},
        {name: tensors[name][:, :1].contiguous()},
        {"one more": tensors[name].clone()},
    ):
        save_file(tensors | changed, tmp_path / "t.safetensors")
        exchange(bundle, (tmp_path / "t.safetensors").read_bytes())
        error = refused(BundleError, lambda: preimage.open_states(bundle))
        assert error.message == f"{bundle / TENSORS} and its manifest disagree."
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "t.safetensors")
    exchange(bundle, (tmp_path / "t.safetensors").read_bytes())
    refused(BundleError, lambda: preimage.open_states(bundle))


def test_hostile_files_take_no_memory(bundle: Path, tmp_path: Path) -> None:
    names = []
    for number, raw in enumerate(HOSTILE.values()):
        names.append(f"{number}.safetensors")
        (tmp_path / names[-1]).write_bytes(raw)
        shutil.copytree(bundle, tmp_path / f"bundle-{number}")
        exchange(tmp_path / f"bundle-{number}", raw)
        names.append(f"bundle-{number}")
    for number, shape in enumerate(["(100000000000, 4)", "(10000000, 40)"]):
        names.append(f"{number}.npy")
        (tmp_path / names[-1]).write_bytes(npy(shape))
    script = f"""
import os, resource
os.chdir({str(tmp_path)!r})
import preimage
from preimage.states import open_states, read_states_file
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
try: read_states_file("0.safetensors")
except preimage.PreimageError: pass
before = peak()
for name in {names!r}:
    try: (open_states if name.startswith("bundle") else read_states_file)(name)
    except preimage.PreimageError: continue
    raise SystemExit(name + " was accepted")
print((peak() - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40  # MiB; the files themselves are up to half a megabyte
