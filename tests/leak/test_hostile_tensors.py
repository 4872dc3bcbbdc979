"""Files that pretend to be of tensors, are of another model, or were made to harm."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from preimage.errors import StatesError
from preimage.leak.holdings import Holding
from preimage.leak.readers import plain_text, tensors
from support.bundles import npy
from support.folders import make_folder
from support.refusing import refused
from support.saved_states import (
    NOBODY,
    PROMPTS,
    TOLD,
    WRITERS,
    known,
    passed,
    sparse,
    truth,
    write_safetensors,
)
from support.tiny import VOCABULARY, build


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "phi3", "mixtral"])
def test_weights_are_no_states(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    assert tensors.read(tmp_path / "model.safetensors", TOLD) is None
    torch.save(build(name).state_dict(), tmp_path / "pytorch_model.bin")
    assert tensors.read(tmp_path / "pytorch_model.bin", NOBODY) is None


def test_files_of_a_model_are_none_of_ours(tmp_path: Path) -> None:
    for path in make_folder(tmp_path / "model").iterdir():
        assert tensors.read(path, NOBODY) is None
        assert plain_text.read(path, NOBODY) is None


def test_weights_by_names_of_a_cache(tmp_path: Path) -> None:
    held = {f"layers.0.attention.{half}": torch.ones(8, 4) for half in ("key", "value")}
    write_safetensors(tmp_path / "t.safetensors", held)  # two axes: no cache
    assert tensors.read(tmp_path / "t.safetensors", NOBODY) is None


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "width": ({"layer_2": torch.ones(5, 31)}, "layer_2 in t.pt has states of 31 numbers; the model has 32."),
    "heads": ({"k.0": torch.ones(1, 3, 5, 8), "v.0": torch.ones(1, 3, 5, 8)}, "has 3 heads of 8 in block 0"),
    "blocks": ({"k.0": torch.ones(1, 2, 5, 8), "k.3": torch.ones(1, 2, 5, 8)}, "in block 3, counted from 0"),
    "layer": ({"layer_9": torch.ones(5, 32)}, "layer_9 in t.pt: "),
    "ids": ({"input_ids": torch.tensor([[1, VOCABULARY]])}, "the vocabulary ends at 40."),
    "no ids": ({"input_ids": torch.tensor([[1, -1000]])}, "has ids from -1000 to 1"),
}


@pytest.mark.parametrize(("held", "said"), WRONG.values(), ids=WRONG)
def test_another_model_is_seen(held: dict[str, torch.Tensor], said: str, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "t.pt")
    error = refused(StatesError, lambda: tensors.read(tmp_path / "t.pt", TOLD))
    assert said in error.message


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "pkl", "pickle", "joblib"])
@pytest.mark.parametrize("new", [True, False])
def test_nothing_is_unpickled(suffix: str, new: bool, tmp_path: Path) -> None:
    mark, path = tmp_path / "opened", tmp_path / f"t.{suffix}"
    for held in (Trap(mark), {"layer_2": torch.ones(2, 32), "k": Trap(mark)}, passed().past_key_values):
        torch.save(held, path, _use_new_zipfile_serialization=new)
        error = refused(StatesError, lambda: tensors.read(path, TOLD))
        assert (
            error.message
            == f"t.{suffix} is a pickle that may hold more than plain tensors; it was not opened."
        )
    path.write_bytes(pickle.dumps(Trap(mark)))
    refused(StatesError, lambda: tensors.read(path, TOLD))
    np.savez(tmp_path / "t.npz", layer_2=np.ones((2, 32)), prompts=np.array([Trap(mark)], dtype=object))
    holding = known(tmp_path / "t.npz")
    assert holding.notes == ("What is named prompts was not read: look whether it is text or token ids.",)
    np.save(tmp_path / "t.npy", np.array([Trap(mark)], dtype=object))
    refused(StatesError, lambda: tensors.read(tmp_path / "t.npy", TOLD))
    assert not mark.exists()


def test_claims_of_ten_gigabytes(tmp_path: Path) -> None:
    ten = 10 << 30
    length = struct.pack("<Q", ten - 8)
    for path in (
        sparse(tmp_path / "a.safetensors", length + b'{"h":', ten),
        sparse(tmp_path / "b.safetensors", length + b'{"h":', 100),
        sparse(tmp_path / "c.npy", npy("(10000000000, 4)"), 1000),
        sparse(tmp_path / "d.pt", b"\x80\x02" + bytes(20), ten),
        sparse(tmp_path / "e.npz", b"PK\x03\x04", ten),
    ):
        refused(StatesError, lambda path=path: tensors.read(path, TOLD))
    for name, start in (("f.bin", b"\x00"), ("g", b"{"), ("h.zip", b"PK\x03\x04")):
        assert tensors.read(sparse(tmp_path / name, start, ten), TOLD) is None
    honest = sparse(tmp_path / "layer_2.npy", npy("(5000000, 512)"), len(npy("")) + 5_000_000 * 512 * 4)
    (one,) = known(honest, NOBODY).pieces[0].seen  # ten gigabytes of zeros, of which nothing is read
    assert one.layer == 2


def test_an_archive_that_grows(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("layer_2.npy", npy("(1000, 4)") + bytes(20_000_000))
    error = refused(StatesError, lambda: tensors.read(tmp_path / "t.npz", TOLD))
    assert "it would grow more than a hundredfold" in error.message
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as file:
        for number in range(20_000):
            file.writestr(f"n{number}.npy", b"")
    assert tensors.read(tmp_path / "t.npz", TOLD) is None


def test_tensors_named_over_and_over(tmp_path: Path) -> None:
    one = torch.zeros(0, 4)
    torch.save([[one] * 30_000] * 30_000, tmp_path / "t.pt")
    error = refused(StatesError, lambda: tensors.read(tmp_path / "t.pt", NOBODY))
    assert error.message == "t.pt names its tensors over and over."


def test_names_that_take_time(tmp_path: Path) -> None:
    begun = time.process_time()
    one = torch.ones(1, 1, dtype=torch.uint8)
    torch.save({"0." * 140 + f"{number}": one.clone() for number in range(2000)}, tmp_path / "t.pt")
    assert tensors.read(tmp_path / "t.pt", NOBODY) is None
    torch.save({"0." * 1000: one}, tmp_path / "t.pt")
    assert "endless names" in refused(StatesError, lambda: tensors.read(tmp_path / "t.pt", NOBODY)).message
    header = {
        f"{number}": {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]}
        for number in range(90_000)
    }
    text = json.dumps(header).encode()
    (tmp_path / "t.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(90_000))
    assert tensors.read(tmp_path / "t.safetensors", NOBODY) is None
    assert time.process_time() - begun < 20


def test_a_file_that_was_exchanged(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"layer_2": truth().at(0, 2)})
    (one,) = known(path).pieces[0].seen
    write_safetensors(path, {"layer_2": torch.ones(6, 32)})
    assert "has changed since it was opened" in refused(StatesError, one.read).message
    path.unlink()
    refused(StatesError, one.read)


def read_all(holding: Holding | None) -> None:
    for piece in holding.pieces if holding is not None else ():
        for seen in piece.seen:
            seen.read()


@pytest.mark.parametrize("name", ["t.safetensors", "t.npz", "t.pt", "t.ckpt"])
def test_damaged_files_are_refused_or_whole(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path, {"layer_2": truth().at(0, 2), "input_ids": torch.tensor(PROMPTS[0])})
    raw = path.read_bytes()
    damaged = [raw[:length] for length in range(0, len(raw), max(1, len(raw) // 60))]
    damaged += [
        raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :] for at in range(0, len(raw), len(raw) // 60)
    ]
    refusals = []
    for one in damaged:
        path.write_bytes(one)
        try:
            read_all(tensors.read(path, NOBODY))
        except StatesError as error:
            refusals.append(error)
    assert len(refusals) > len(damaged) // 4
    assert all(error.hint and "\n" not in str(error) for error in refusals)
