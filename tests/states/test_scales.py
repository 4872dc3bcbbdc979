"""Files of 8-bit codes with scales beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import preimage
from preimage.errors import StatesError
from preimage.states import read_states_file
from preimage.states.scales import multiplied
from support.refusing import refused
from support.tiny import random_ids, tiny

X = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


def int8(scale: Tensor) -> Tensor:
    return (X / scale).round().clamp(-128, 127).to(torch.int8)


def test_scales_of_every_shape() -> None:
    a_row = X.abs().amax(dim=1, keepdim=True) / 127
    a_column = X.abs().amax(dim=0, keepdim=True) / 127
    one = X.abs().max() / 127
    groups = X.unflatten(1, (3, 4)).abs().amax(dim=2) / 127
    for scale, said in (
        (a_row, (a_row, a_row[:, 0])),
        (a_column, (a_column, a_column[0])),
        (one, (one, one[None], one[None, None])),
        (groups.repeat_interleave(4, dim=1), (groups,)),
    ):
        for given in said:
            assert torch.equal(multiplied(int8(scale), given), int8(scale).float() * scale), given.shape
    shifted = int8(a_row).short().add(128).to(torch.uint8)
    zero = torch.full((5, 1), 128, dtype=torch.uint8)
    assert torch.equal(multiplied(shifted, a_row, zero), int8(a_row).float() * a_row)


@pytest.mark.parametrize("shape", [(4,), (5, 5), (12, 1), (2, 5, 1)])
def test_scales_that_do_not_go_with_codes_are_refused(shape: tuple[int, ...]) -> None:
    refused(StatesError, lambda: multiplied(int8(torch.tensor(0.1)), torch.ones(shape)))
    square = torch.zeros(6, 6, dtype=torch.int8)
    refused(StatesError, lambda: multiplied(square, torch.ones(6)))  # rows or columns


def as_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(dim=1, keepdim=True) / 127
    return (rows / scale).round().to(torch.int8), scale


def as_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(dim=1, keepdim=True) / 448
    return (rows / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("kept", [as_int8, as_fp8])
def test_codes_and_scales_of_a_file_are_read_and_inverted(
    kept: Callable[[Tensor], tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    model, ids = tiny("llama"), random_ids(9)
    codes, scale = kept(model.states(torch.tensor([ids]), (2,))[2][0])
    files = {
        "own.safetensors": {"h": codes, "h_scale": scale},
        "bare.safetensors": {"hidden_states.2": codes, "scale": scale},
        "named.safetensors": {"h": codes, "s": scale},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
        held = read_states_file(tmp_path / name, scale_key="s" if "s" in tensors else None)
        assert torch.equal(torch.as_tensor(held.states), codes.float() * scale)
        (result,) = preimage.invert(model, held.states, 2)
        assert (result.status in ("recovered", "likely"), list(result.token_ids)) == (True, ids)
    torch.save(files["own.safetensors"], tmp_path / "x.pt")
    assert torch.equal(torch.as_tensor(read_states_file(tmp_path / "x.pt").states), codes.float() * scale)


def test_one_scale_for_all_may_be_a_bare_number(tmp_path: Path) -> None:
    save_file({"h": int8(torch.tensor(0.1)), "h.scale": torch.tensor(0.1)}, tmp_path / "x.safetensors")
    held = read_states_file(tmp_path / "x.safetensors")
    assert torch.equal(torch.as_tensor(held.states), int8(torch.tensor(0.1)).float() * 0.1)
    np.savez(tmp_path / "x.npz", h=int8(torch.tensor(0.1)).numpy(), scale=np.float32(0.1))
    assert torch.equal(
        torch.as_tensor(read_states_file(tmp_path / "x.npz").states), torch.as_tensor(held.states)
    )


def test_scales_that_are_not_there_or_not_needed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"h": int8(torch.tensor(0.1)), "s": torch.tensor([0.1])}, path)
    assert "--scale-key" in refused(StatesError, lambda: read_states_file(path, "h", scale_key="no")).hint
    save_file({"h": X, "s": torch.tensor([0.1])}, path)
    refused(StatesError, lambda: read_states_file(path, "h", scale_key="s"))
    save_file({"h": X, "h_scale": torch.tensor([0.1])}, path)  # numbers, not codes: they are what they are
    assert torch.equal(torch.as_tensor(read_states_file(path).states), X)
