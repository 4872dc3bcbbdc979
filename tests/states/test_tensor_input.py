"""Files from elsewhere: what is read, and what is never opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from preimage.errors import StatesError
from preimage.states import States, read_states_file
from support.bundles import npy
from support.refusing import refused


def test_one_tensor_of_a_safetensors_file_is_read_without_its_name(tmp_path: Path) -> None:
    path, wanted = tmp_path / "t.safetensors", torch.randn(5, 8, dtype=torch.bfloat16)
    save_file({"h": wanted}, path)
    assert torch.equal(read_states_file(path).states, wanted)
    assert torch.equal(read_states_file(str(path), "h").states, wanted)
    error = refused(StatesError, lambda: read_states_file(path, "k"))
    assert error.message == "t.safetensors holds no tensor 'k'."
    assert error.hint == "Name one of h with --key."


def test_several_tensors_need_a_key(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {f"t{i}": torch.randn(2, 3) for i in range(9)} | {"scalar": torch.tensor(1.0)}
    save_file(tensors, path)
    assert torch.equal(read_states_file(path, "t4").states, tensors["t4"])
    error = refused(StatesError, lambda: read_states_file(path))
    assert error.message == "t.safetensors holds 10 tensors."
    assert error.hint == "Name one of scalar, t0, t1, t2, t3, t4, t5, t6 … with --key."
    refused(StatesError, lambda: read_states_file(path, "scalar"))


def test_a_safetensors_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "t.safetensors")
    error = refused(StatesError, lambda: read_states_file(tmp_path / "t.safetensors"))
    assert "holds 0 tensors" in error.message


@pytest.mark.parametrize("kind", ["<f4", "<f8", "<f2", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_every_float_is_read(kind: str, order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)).astype(kind), order=order)
    np.save(tmp_path / "t.npy", array)
    found = read_states_file(tmp_path / "t.npy").states
    assert found.dtype == getattr(torch, array.dtype.newbyteorder("=").name)
    assert found.tolist() == array.tolist()
    found += 1  # a tensor of one's own, not a view of the file
    assert read_states_file(tmp_path / "t.npy").states.tolist() == array.tolist()


def test_an_npy_has_no_names(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.ones((3, 4), np.float32))
    for keys in ({"key": "h"}, {"mask_key": "m"}):
        error = refused(StatesError, lambda keys=keys: read_states_file(tmp_path / "t.npy", **keys))
        assert error.message == "t.npy holds nothing by a name."


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_inside_an_npy_is_never_opened(tmp_path: Path) -> None:
    mark = tmp_path / "opened"
    array = np.array([Trap(mark)], dtype=object)
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    error = refused(StatesError, lambda: read_states_file(tmp_path / "t.npy"))
    assert "t.npy cannot be read as a plain array" in error.message
    assert not mark.exists()
    np.load(tmp_path / "t.npy", allow_pickle=True)
    assert mark.exists()  # the trap does work


@pytest.mark.parametrize("suffix", [".pkl", ".txt", ".gguf", ""])
def test_other_files_are_refused_unopened(suffix: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "opened", tmp_path / f"t{suffix}"
    torch.save(Trap(mark), path)
    error = refused(StatesError, lambda: read_states_file(path))
    assert error.message == f"t{suffix} is none of .safetensors, .npy, .npz, .pt, .pth, .bin."
    assert not mark.exists()


NO_ARRAYS: dict[str, bytes] = {
    "text": b"0.1 0.2 0.3\n",
    "empty": b"",
    "zip": b"PK\x03\x04" + bytes(60),
    "magic alone": b"\x93NUMPY",
    "no header": b"\x93NUMPY\x01\x00\xff\xff{",
    "code": b"\x93NUMPY\x01\x00\x1c\x00__import__('os').mkdir('x')\n",
}


@pytest.mark.parametrize("raw", NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_a_file_that_is_only_called_npy(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    path.write_bytes(raw)
    error = refused(StatesError, lambda: read_states_file(path))
    assert "t.npy cannot be read as a plain array" in error.message
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "shape", ["(1000000000000, 4)", "(5, 4)", "(-1, 4)", f"({2**62}, {2**62})", "(0, 4)", "('a', 4)"]
)
def test_npy_shapes_the_file_cannot_hold(shape: str, tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(npy(shape))
    if shape == "(0, 4)":
        refused(StatesError, lambda: States.from_tensor(read_states_file(tmp_path / "t.npy").states, 1))
    else:
        error = refused(StatesError, lambda: read_states_file(tmp_path / "t.npy"))
        assert "t.npy cannot be read as a plain array" in error.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    for name in ("t.npy", "t.npz", "t.safetensors", "t.pt", "t.pth", "t.bin"):
        error = refused(StatesError, lambda name=name: read_states_file(tmp_path / name))
        assert error.message == f"There is no file {tmp_path / name}."
    refused(StatesError, lambda: read_states_file(tmp_path))
