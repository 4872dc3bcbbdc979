"""Tensors from elsewhere: what is read, and what is never opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import preimage
from preimage.errors import StatesError
from preimage.states import States, read_tensor
from support.bundles import npy, same_numbers
from support.refusing import refused
from support.tiny import tiny


def test_one_tensor_of_a_safetensors_file_is_read_without_its_name(tmp_path: Path) -> None:
    path, wanted = tmp_path / "t.safetensors", torch.randn(5, 8, dtype=torch.bfloat16)
    save_file({"h": wanted}, path)
    assert torch.equal(read_tensor(path), wanted)
    assert torch.equal(read_tensor(str(path), "h"), wanted)
    error = refused(StatesError, lambda: read_tensor(path, "k"))
    assert error.message == "t.safetensors holds no tensor 'k'."
    assert error.hint == "Name one of h with --key."


def test_several_tensors_need_a_key(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {f"t{i}": torch.randn(2, 3) for i in range(9)} | {"scalar": torch.tensor(1.0)}
    save_file(tensors, path)
    assert torch.equal(read_tensor(path, "t4"), tensors["t4"])
    error = refused(StatesError, lambda: read_tensor(path))
    assert error.message == "t.safetensors holds 10 tensors."
    assert error.hint == "Name one of scalar, t0, t1, t2, t3, t4, t5, t6 … with --key."
    refused(StatesError, lambda: read_tensor(path, "scalar"))


def test_a_safetensors_file_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "t.safetensors")
    error = refused(StatesError, lambda: read_tensor(tmp_path / "t.safetensors"))
    assert "holds 0 tensors" in error.message


@pytest.mark.parametrize("kind", ["<f4", "<f8", "<f2", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_every_float_is_read(kind: str, order: str, tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)).astype(kind), order=order)
    np.save(tmp_path / "t.npy", array)
    found = read_tensor(tmp_path / "t.npy")
    assert found.dtype == getattr(torch, array.dtype.newbyteorder("=").name)
    assert found.tolist() == array.tolist()
    found += 1  # a tensor of one's own, not a view of the file
    assert read_tensor(tmp_path / "t.npy").tolist() == array.tolist()


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
    error = refused(StatesError, lambda: read_tensor(tmp_path / "t.npy"))
    assert "t.npy cannot be read as a plain array" in error.message
    assert not mark.exists()
    np.load(tmp_path / "t.npy", allow_pickle=True)
    assert mark.exists()  # the trap does work


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pkl", ".npz", ".txt", ""])
def test_other_files_are_refused_unopened(suffix: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "opened", tmp_path / f"t{suffix}"
    torch.save(Trap(mark), path)
    error = refused(StatesError, lambda: read_tensor(path))
    assert error.message == f"t{suffix} is neither .safetensors nor .npy."
    assert "pickles are never opened" in error.hint
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
    error = refused(StatesError, lambda: read_tensor(path))
    assert "t.npy cannot be read as a plain array" in error.message
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "shape", ["(1000000000000, 4)", "(5, 4)", "(-1, 4)", f"({2**62}, {2**62})", "(0, 4)", "('a', 4)"]
)
def test_npy_shapes_the_file_cannot_hold(shape: str, tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(npy(shape))
    if shape == "(0, 4)":
        refused(StatesError, lambda: States.from_tensor(read_tensor(tmp_path / "t.npy"), 1))
    else:
        error = refused(StatesError, lambda: read_tensor(tmp_path / "t.npy"))
        assert "t.npy cannot be read as a plain array" in error.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    for name in ("t.npy", "t.safetensors", "t.pt"):
        error = refused(StatesError, lambda name=name: read_tensor(tmp_path / name))
        assert error.message == f"There is no file {tmp_path / name}."
    refused(StatesError, lambda: read_tensor(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_tensor_becomes_states_with_or_without_a_batch_axis(dtype: torch.dtype, tmp_path: Path) -> None:
    batch = torch.randn(3, 5, 32, dtype=dtype)
    states = States.from_tensor(batch, 2)
    assert (len(states), states.lengths, states.layers, states.d_model) == (3, (5, 5, 5), (2,), 32)
    assert states.token_ids is None
    assert states.model is None
    assert states.noise_floor == {}
    assert torch.equal(states.at(1, 2), batch[1])
    assert torch.equal(states.last(2), batch[:, -1])
    same_numbers(preimage.open_states(states.save(tmp_path / "b")), states)
    single = States.from_tensor(batch[1].T.contiguous().T, "final", tiny("llama"))  # strides do not matter
    assert (len(single), single.lengths, single.layers) == (1, (5,), ("final",))
    assert torch.equal(single.at(0, "final"), batch[1])
    assert single.model == tiny("llama").identity.to_dict()
    same_numbers(preimage.open_states(single.save(tmp_path / "c")), single)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(()),
        torch.zeros(1, 2, 3, 4),
        torch.zeros(0, 4),
        torch.zeros(4, 0),
        torch.zeros(2, 0, 4),
        torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.bool),
        torch.zeros(3, 4, dtype=torch.complex64),
        torch.zeros(3, 4).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_tensors_that_hold_no_states_are_refused(tensor: torch.Tensor) -> None:
    error = refused(StatesError, lambda: States.from_tensor(tensor, 1))
    assert f"shape {tuple(tensor.shape)} and type {tensor.dtype} holds no states" in error.message
    assert "positions x d_model" in error.hint


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_named_by_prompt_layer_and_position(bad: float) -> None:
    tensor = torch.randn(3, 5, 8)
    tensor[1, 4, 7] = bad
    error = refused(StatesError, lambda: States.from_tensor(tensor, "final"))
    assert error.message == "Prompt 1, layer final, position 4 holds NaN or infinity."
    error = refused(StatesError, lambda: States.from_tensor(tensor[1], 3))
    assert error.message == "Prompt 0, layer 3, position 4 holds NaN or infinity."


def test_a_tensor_of_another_width_is_refused() -> None:
    error = refused(StatesError, lambda: States.from_tensor(torch.randn(3, 31), 1, tiny("llama")))
    assert "31 wide, those of LlamaForCausalLM are 32" in error.message
