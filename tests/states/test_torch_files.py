"""Files of torch.save, npz archives and names in them: what is chosen, and what cannot hurt."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import preimage
from preimage.errors import LayerError, StatesError
from preimage.states import read_states_file, states_from
from support.bundles import npy
from support.refusing import refused
from support.tiny import random_ids, tiny

Write = Callable[[Path, dict[str, torch.Tensor]], Path]


def write_safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "t.safetensors")
    return folder / "t.safetensors"


def write_npz(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    np.savez(folder / "t.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    return folder / "t.npz"


def write_compressed(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    np.savez_compressed(folder / "t.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    return folder / "t.npz"


def write_torch(folder: Path, tensors: dict[str, torch.Tensor], suffix: str = "pt") -> Path:
    torch.save(tensors, folder / f"t.{suffix}")
    return folder / f"t.{suffix}"


def write_old_torch(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, folder / "t.bin", _use_new_zipfile_serialization=False)
    return folder / "t.bin"


WRITERS: dict[str, Write] = {
    "safetensors": write_safetensors,
    "npz": write_npz,
    "compressed npz": write_compressed,
    "pt": write_torch,
    "pth": lambda folder, tensors: write_torch(folder, tensors, "pth"),
    "old bin": write_old_torch,
}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@every_writer
def test_states_and_their_mask(write: Write, tmp_path: Path) -> None:
    states, mask = torch.randn(2, 5, 8), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    path = write(tmp_path, {"h": states})
    held = read_states_file(path)
    assert torch.equal(held.states, states)
    assert (held.mask, held.key) == (None, "h")
    for name in ("attention_mask", "mask"):
        held = read_states_file(write(tmp_path, {"h": states, name: mask}))
        assert held.key == "h"
        assert held.mask.tolist() == mask.tolist()
    path = write(tmp_path, {"h": states, "seen": mask, "mask": mask * 0})
    held = read_states_file(path, "h", "seen")
    assert held.mask.tolist() == mask.tolist()
    error = refused(StatesError, lambda: read_states_file(path, "h", "k"))
    assert error.message == f"{path.name} holds no tensor 'k'."
    assert error.hint.endswith("with --mask-key.")
    error = refused(StatesError, lambda: read_states_file(path, "k"))
    assert error.message == f"{path.name} holds no tensor 'k'."
    path = write(tmp_path, {"h": states, "attention_mask": mask, "mask": mask.clone()})
    error = refused(StatesError, lambda: read_states_file(path))
    assert error.message == f"{path.name} holds attention_mask and mask."


@every_writer
@pytest.mark.parametrize("name", ["hidden_states.15", "layer_15", "15", "layer.015", "hidden_state_15"])
def test_a_name_that_says_the_layer_is_found(name: str, write: Write, tmp_path: Path) -> None:
    wanted = torch.randn(4, 8)
    path = write(tmp_path, {name: wanted, name.replace("5", "4"): torch.zeros(4, 8)})
    held = read_states_file(path, layer=15)
    assert torch.equal(held.states, wanted)
    assert held.key == name
    for layer in (None, 5, 1, 16, "final"):
        error = refused(StatesError, lambda layer=layer: read_states_file(path, layer=layer))
        assert error.message == f"{path.name} holds 2 tensors."
        assert name in error.hint


def test_names_of_modules_say_no_layer(tmp_path: Path) -> None:
    names = ("model.layers.3", "blocks.3.hook_resid_post", "h.3", "transformer.h.3", "3.4")
    path = write_safetensors(tmp_path, {name: torch.randn(4, 8) for name in names})
    refused(StatesError, lambda: read_states_file(path, layer=3))  # they count from 0: it is layer 4 there
    path = write_safetensors(tmp_path, {"layer_3": torch.randn(4, 8), "3": torch.randn(4, 8)})
    refused(StatesError, lambda: read_states_file(path, layer=3))


def test_the_last_of_all_hidden_states_is_after_the_norm(tmp_path: Path) -> None:
    tensors = {f"hidden_states.{k}": torch.randn(4, 8) for k in range(4)}
    path = write_safetensors(tmp_path, tensors)
    assert read_states_file(path, layer=2).key == "hidden_states.2"
    assert read_states_file(path, layer="final").key == "hidden_states.3"
    error = refused(LayerError, lambda: read_states_file(path, layer=3))
    assert error.message == "hidden_states.3 is the last of hidden_states: what leaves the final norm."
    assert read_states_file(path, "hidden_states.3", layer=3).key == "hidden_states.3"  # as it was said
    del tensors["hidden_states.0"]
    assert read_states_file(write_safetensors(tmp_path, tensors), layer=3).key == "hidden_states.3"
    path = write_safetensors(tmp_path, {"final": torch.randn(4, 8), "3": torch.randn(4, 8)})
    assert read_states_file(path, layer="final").key == "final"


def test_torch_files_without_names(tmp_path: Path) -> None:
    model = tiny("llama")
    prompts = [random_ids(5), random_ids(3, seed=1)]
    truth = preimage.capture(model, prompts, 2)
    torch.save(truth.at(0, 2), tmp_path / "t.pt")
    held = read_states_file(tmp_path / "t.pt")
    assert torch.equal(held.states, truth.at(0, 2))
    torch.save([truth.at(0, 2), truth.at(1, 2)], tmp_path / "t.pt")
    states = states_from(read_states_file(tmp_path / "t.pt").states, model, 2)
    assert states.lengths == (5, 3)
    outputs = model.module(torch.tensor([prompts[0]]), output_hidden_states=True)
    torch.save(outputs.hidden_states, tmp_path / "t.pt")
    states = states_from(read_states_file(tmp_path / "t.pt").states, model, 2)
    assert torch.equal(states.at(0, 2), truth.at(0, 2))
    pairs = tuple((layer.keys, layer.values) for layer in outputs.past_key_values.layers)
    torch.save(pairs, tmp_path / "t.pt")
    states = states_from(read_states_file(tmp_path / "t.pt").states, model, 2)
    assert states.observation.place == "kv"
    torch.save({15: torch.ones(3, 4), "note": "mine", "more": {"deep": torch.ones(2, 2)}}, tmp_path / "t.pt")
    assert read_states_file(tmp_path / "t.pt").key == "15"
    error = refused(StatesError, lambda: read_states_file(tmp_path / "t.pt", "more"))
    assert error.message == "t.pt holds no tensor 'more'."


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin"])
@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_torch_file_is_never_run(suffix: str, new: bool, tmp_path: Path) -> None:
    mark, path = tmp_path / "opened", tmp_path / f"t.{suffix}"
    for held in (Trap(mark), {"h": torch.ones(2, 2), "k": Trap(mark)}, [torch.ones(2, 2), Trap(mark)]):
        torch.save(held, path, _use_new_zipfile_serialization=new)
        error = refused(StatesError, lambda: read_states_file(path))
        assert f"t.{suffix} cannot be read as plain tensors" in error.message
        assert not mark.exists()
    path.write_bytes(pickle.dumps(Trap(mark)))
    refused(StatesError, lambda: read_states_file(path))
    assert not mark.exists()


def loop() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


NO_TENSORS: dict[str, Callable[[], Any]] = {
    "number": lambda: 3.0,
    "text": lambda: "states",
    "nothing": lambda: None,
    "empty dict": dict,
    "empty list": list,
    "nested dicts": lambda: {"a": {"b": torch.ones(2, 2)}},
    "list of dicts": lambda: [{"h": torch.ones(2, 2)}],
    "list of numbers": lambda: [1.0, 2.0],
    "lists in lists in lists": lambda: [[[torch.ones(2, 2)]]],
    "list of itself": loop,
    "deep list": lambda: deep(),
    "expanded": lambda: torch.ones(1).expand(10**6, 10**6),
    "expanded in a list": lambda: [torch.ones(1, 1).expand(10**4, 10**4)] * 10**4,
    "the same many times": lambda: [torch.ones(100, 100)] * 10**5,
    "expanded in a dict": lambda: {"h": torch.ones(1).expand(10**6, 10**6)},
    "sparse": lambda: torch.eye(4).to_sparse(),
    "one name twice": lambda: {1: torch.ones(2, 2), "1": torch.zeros(2, 2)},
    "model": lambda: torch.nn.Linear(2, 2),
}


def deep() -> list[Any]:
    held: list[Any] = [torch.ones(2, 2)]
    for _ in range(200):
        held = [held]
    return held


@pytest.mark.parametrize("make", NO_TENSORS.values(), ids=NO_TENSORS)
def test_torch_files_that_hold_no_tensors(make: Callable[[], Any], tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(make(), path)
    error = refused(StatesError, lambda: read_states_file(path))
    assert error.message.startswith("t.pt ")


def whole(folder: Path, suffix: str) -> bytes:
    tensors = {"h": torch.randn(20, 8), "k": torch.randn(3, 8)}
    write = {"npz": write_npz, "pt": write_torch, "bin": write_old_torch}[suffix]
    return write(folder, tensors).read_bytes()


def outcome(path: Path) -> StatesError | None:
    """How a damaged file is refused; None where it gives the states it had, or one changed number of them."""
    try:
        held = read_states_file(path, "h").states
    except StatesError as error:
        return error
    assert held.shape == (20, 8)
    return None


@pytest.mark.parametrize("suffix", ["npz", "pt", "bin"])
def test_damaged_files_are_refused_or_whole(suffix: str, tmp_path: Path) -> None:
    raw, path = whole(tmp_path, suffix), tmp_path / f"t.{suffix}"
    damaged = [raw[:length] for length in range(0, len(raw) - 1, max(1, len(raw) // 60))]
    for at in range(0, len(raw), max(1, len(raw) // 120)):
        damaged.append(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
    damaged += [b"", b"PK\x03\x04" + bytes(60), b"0.1 0.2\n", b"\x80\x02."]
    refusals = 0
    for one in damaged:
        path.write_bytes(one)
        error = outcome(path)
        if error is not None:
            refusals += 1
            assert error.hint
            assert "\n" not in str(error)
    assert refusals > len(damaged) // 4


def archive(path: Path, entries: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        for name, raw in entries.items():
            file.writestr(name, raw)
    return path


def test_hostile_npz(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    bombs = {
        "it would grow more than a hundredfold": npy("(1000, 4)") + bytes(20_000_000),
        "its shape (1000000000000, 4) is not what it holds": npy("(1000000000000, 4)"),
    }
    for said, raw in bombs.items():
        archive(path, {"h.npy": raw})
        error = refused(StatesError, lambda: read_states_file(path))
        assert said in error.message
    for raw in (b"", b"\x93NUMPY", npy("(5, 4)"), npy("(-4, -4)"), npy("(4, 4)", "|O"), npy("('a', 4)")):
        archive(path, {"h.npy": raw})
        refused(StatesError, lambda: read_states_file(path))
    np.savez(path, h=np.array([Trap(tmp_path / "opened")], dtype=object))
    error = refused(StatesError, lambda: read_states_file(path))
    assert "cannot be read as a plain array" in error.message
    assert not (tmp_path / "opened").exists()
    np.savez(path)
    refused(StatesError, lambda: read_states_file(path))


def test_a_compressed_torch_file_is_refused(tmp_path: Path) -> None:
    path = write_torch(tmp_path, {"h": torch.zeros(100, 100)})
    with zipfile.ZipFile(path) as file:
        entries = {info.filename: file.read(info) for info in file.infolist()}
    archive(path, entries)
    error = refused(StatesError, lambda: read_states_file(path))
    assert "cannot be read as plain tensors" in error.message


def test_hostile_torch_files_take_no_memory(tmp_path: Path) -> None:
    names = []
    for number, make in enumerate(NO_TENSORS.values()):
        torch.save(make(), tmp_path / f"{number}.pt")
        names.append(f"{number}.pt")
    archive(tmp_path / "0.npz", {"h.npy": npy("(100000000000, 4)")})
    archive(tmp_path / "1.npz", {"h.npy": npy("(10000000, 40)") + bytes(1_600_000_000 // 8)})
    script = f"""
import os, resource
os.chdir({str(tmp_path)!r})
import preimage
from preimage.states import read_states_file
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
try: read_states_file("0.pt")
except preimage.PreimageError: pass
before = peak()
for name in {[*names, "0.npz", "1.npz"]!r}:
    try: read_states_file(name)
    except preimage.PreimageError: continue
    raise SystemExit(name + " was accepted")
print((peak() - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 60  # MiB
