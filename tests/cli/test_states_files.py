"""States in files people have, inverted or made into bundles by typing one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import preimage
from support.commands import WIDTH, Typed

TEXTS = ["the cat sat", "a dog"]


@pytest.fixture
def outputs(model: str) -> tuple[Any, torch.Tensor]:
    """A padded batch of plain transformers, and its mask."""
    loaded = preimage.load(model)
    loaded.tokenizer.pad_token = loaded.tokenizer.eos_token
    batch = loaded.tokenizer(TEXTS, return_tensors="pt", padding=True)
    mask = batch["attention_mask"]
    assert not mask.all()
    with torch.no_grad():
        return loaded.module(batch["input_ids"], attention_mask=mask, output_hidden_states=True), mask


def write(folder: Path, suffix: str, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / f"states.{suffix}"
    if suffix == "safetensors":
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    elif suffix == "npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        torch.save(tensors, path)
    return path


def recovered(found: dict[str, Any]) -> list[str]:
    assert [result["status"] for result in found["results"]] == ["recovered"] * len(found["results"])
    assert [result["exact"] for result in found["results"]] == [None] * len(found["results"])
    return [result["text"].removeprefix("<s>") for result in found["results"]]


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt", "pth", "bin"])
def test_a_file_is_inverted(
    suffix: str, outputs: Any, document: Any, run: Typed, model: str, tmp_path: Path
) -> None:
    passed, mask = outputs
    path = write(tmp_path, suffix, {"layer_1": passed.hidden_states[1], "layer_2": passed.hidden_states[2],
                                    "attention_mask": mask})  # fmt: skip
    code, found = document("invert", path, "--layer", 2, "--model", model)
    assert (code, recovered(found)) == (0, TEXTS)
    assert (found["key"], found["observation"]["place"], found["prompts"]) == ("layer_2", "residual", None)
    assert found["model"] == preimage.load(model).identity.to_dict()
    code, found = document("invert", path, "--layer", 2, "--key", "layer_1", "--model", model)
    assert (code, found["key"]) == (1, "layer_1")  # of another layer: not recovered, never guessed
    code, out, err = run("invert", path, "--layer", 1, "--mask-key", "attention_mask", "--model", model)
    assert (code, err) == (0, "")
    assert "<s>the cat sat" in out


def test_files_without_names(outputs: Any, document: Any, model: str, tmp_path: Path) -> None:
    passed, mask = outputs
    row = passed.hidden_states[2][0][mask[0].bool()]
    np.save(tmp_path / "t.npy", row.numpy())
    torch.save(row, tmp_path / "t.pt")
    torch.save([passed.hidden_states[2][i][mask[i].bool()] for i in range(2)], tmp_path / "ragged.pt")
    torch.save(tuple(one[:1] for one in passed.hidden_states), tmp_path / "all.pt")
    for name in ("t.npy", "t.pt", "all.pt"):
        code, found = document("invert", tmp_path / name, "--layer", 2, "--model", model)
        assert (code, recovered(found)) == (0, TEXTS[:1])
    code, found = document("invert", tmp_path / "ragged.pt", "--layer", 2, "--model", model)
    assert (code, recovered(found)) == (0, TEXTS)
    code, found = document("invert", tmp_path / "all.pt", "--observe", "final", "--model", model)
    assert (code, found["results"][0]["layer"], recovered(found)) == (0, "final", TEXTS[:1])
    code, found = document("invert", tmp_path / "all.pt", "--layer", 3, "--model", model)
    assert (code, found["error"]["code"]) == (2, "bad_layer")


def test_codes_with_scales_and_missing_positions(
    outputs: Any, document: Any, model: str, tmp_path: Path
) -> None:
    passed, mask = outputs
    row = passed.hidden_states[2][0][mask[0].bool()]
    scale = row.abs().amax(dim=1, keepdim=True) / 127
    codes = (row / scale).round().to(torch.int8).numpy()
    np.savez(tmp_path / "own.npz", h=codes, h_scale=scale.numpy())
    np.savez(tmp_path / "named.npz", h=codes, factors=scale.numpy())
    for name, more in (("own.npz", []), ("named.npz", ["--scale-key", "factors"])):
        code, found = document("invert", tmp_path / name, "--layer", 2, "--model", model, *more)
        assert (code, found["results"][0]["text"]) == (0, f"<s>{TEXTS[0]}")
    kept = [place for place in range(len(row)) if place != 1]
    np.save(tmp_path / "some.npy", row[kept].numpy())
    told = ",".join(map(str, kept))
    code, found = document("invert", tmp_path / "some.npy", "--layer", 2, "--at", told, "--model", model)
    result = found["results"][0]
    assert (code, result["status"], result["text"]) == (0, "likely", f"<s>{TEXTS[0]}")
    assert found["observation"]["at"] == kept


def test_a_file_continues_its_run(outputs: Any, document: Any, model: str, tmp_path: Path) -> None:
    passed, mask = outputs
    path = write(tmp_path, "npz", {"h": passed.hidden_states[1], "mask": mask})
    given = ["invert", path, "--layer", 1, "--model", model, "--out", tmp_path / "run"]
    code, first = document(*given)
    assert code == 0
    code, second = document(*given)
    assert (code, second["results"]) == (0, first["results"])


def test_what_is_told_of_a_bundle_must_agree(document: Any, bundle: Path) -> None:
    code, found = document("invert", bundle, "--layer", 1, "--observe", "residual", "--stored", "float32")
    assert code == 0
    assert found["observation"]["stored"] == "float32"
    code, found = document("invert", bundle, "--layer", 1, "--observe", "keys")
    assert (code, found["error"]["code"]) == (2, "bad_states")
    code, found = document("invert", bundle, "--layer", 1, "--key", "h")
    assert (code, found["error"]["message"]) == (2, "--key cannot be used here.")


BAD: dict[str, tuple[list[object], str]] = {
    "no layer": (["h.npy"], "h.npy does not say its layer."),
    "missing": (["none.npy", "--layer", 1], "There is no file"),
    "another kind": (["h.gguf", "--layer", 1], "h.gguf is none of"),
    "final and a layer": (["h.npy", "--layer", 1, "--observe", "final"], "Give one of them."),
    "prompts too": (["h.npy", "--layer", 1, "--text", "x"], "States and prompts were given."),
    "no such place": (["h.npy", "--layer", 1, "--observe", "soul"], "observe 'soul' is not known."),
    "no such type": (["h.npy", "--layer", 1, "--stored", "int3"], "stored 'int3' is not known."),
    "rotary of states": (["h.npy", "--layer", 1, "--rotary", "before"], "has no rotary positions."),
    "key of an npy": (["h.npy", "--layer", 1, "--key", "h"], "h.npy holds nothing by a name."),
    "another width": (["wide.npy", "--layer", 1], "These states are 31 wide, those of this model are 32."),
    "keys of another width": (
        ["wide.npy", "--layer", 1, "--observe", "keys"],
        "These keys are 31 wide, those of ",
    ),
    "one vector": (["one.npy", "--layer", 1], "A tensor of shape (32,) is not the states of prompts."),
    "code": (["code.pt", "--layer", 1], "code.pt cannot be read as plain tensors: UnpicklingError."),
    "hole": (["hole.npz", "--layer", 1], "The attention mask has a hole in prompt 0."),
    "text with a place": (["--text", "x", "--observe", "kv"], "--observe cannot be used here."),
    "scales of an npy": (["h.npy", "--layer", 1, "--scale-key", "s"], "h.npy holds nothing by a name."),
    "no positions": (["h.npy", "--layer", 1, "--at", "x"], "--at 'x' names no positions."),
    "descending positions": (["h.npy", "--layer", 1, "--at", "1,0,2"], "Positions (1, 0, 2) are not"),
    "a range backwards": (["h.npy", "--layer", 1, "--at", "4-3"], "--at '4-3' counts backwards."),
    "fewer positions": (["h.npy", "--layer", 1, "--at", "0,2"], "2 positions were named, and a prompt has 3"),
    "text with positions": (["--text", "x", "--at", "0,2"], "--at cannot be used here."),
    "text with a key": (["--text", "x", "--key", "k", "--permuted"], "--key and --permuted cannot be used"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_cannot_be_used(case: str, document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given, message = BAD[case]
    np.save(tmp_path / "h.npy", np.ones((3, WIDTH), np.float32))
    np.save(tmp_path / "wide.npy", np.ones((3, 31), np.float32))
    np.save(tmp_path / "one.npy", np.ones(WIDTH, np.float32))
    np.savez(tmp_path / "hole.npz", h=np.ones((1, 3, WIDTH), np.float32), mask=[[1, 0, 1]])
    torch.save(torch.nn.Linear(2, 2), tmp_path / "code.pt")
    (tmp_path / "h.gguf").write_bytes(b"GGUF")
    argv = [tmp_path / part if str(part).partition(".")[2] else part for part in given]
    code, found = document("invert", *argv, "--model", model, "--out", tmp_path / "out")
    assert code == 2
    assert message in f"{found['error']['message']} {found['error']['hint']}"
    code, out, err = run("invert", *argv, "--model", model, "--out", tmp_path / "out")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not (tmp_path / "out").exists()


def test_bundles_of_files(outputs: Any, document: Any, model: str, tmp_path: Path) -> None:
    passed, mask = outputs
    path = write(tmp_path, "pt", {"hidden_states.2": passed.hidden_states[2], "seen": mask})
    given = ["capture", "--from-tensor", path, "--layer", 2, "--mask-key", "seen", "--model", model]
    code, found = document(*given, "--out", tmp_path / "b")
    assert (code, found["prompts"], found["model"]) == (0, 2, None)
    code, found = document("invert", tmp_path / "b", "--model", model)
    assert (code, recovered(found)) == (0, TEXTS)
    rows = passed.hidden_states[2][:, 0].clone()
    path = write(tmp_path, "safetensors", {"h": rows})
    given = ["capture", "--from-tensor", path, "--layer", 2, "--positions", "mean", "--model", model]
    code, found = document(*given, "--out", tmp_path / "c")
    assert (code, found["prompts"], found["positions"]) == (0, 2, "mean")
    states = preimage.open_states(tmp_path / "c")
    assert (states.observation.positions, states.lengths) == ("mean", (0, 0))
    assert torch.equal(states.last(2), rows)


def test_bundles_of_keys(outputs: Any, document: Any, model: str, tmp_path: Path) -> None:
    passed, mask = outputs
    keys = passed.past_key_values.layers[1].keys
    path = write(tmp_path, "npz", {"keys": keys, "mask": mask})
    given = ["capture", "--from-tensor", path, "--layer", 2, "--observe", "keys", "--model", model]
    code, found = document(*given, "--out", tmp_path / "b")
    assert (code, found["observation"]["place"], found["layers"]) == (0, "keys", [2])
    states = preimage.open_states(tmp_path / "b")
    assert states.d_model == keys.shape[1] * keys.shape[3]
    assert torch.equal(states.at(0, 2), keys[0].transpose(0, 1).flatten(1)[mask[0].bool()])
