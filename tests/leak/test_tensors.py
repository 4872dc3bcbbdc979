"""Plain tensors and caches of real passes, saved as people save them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import preimage
from preimage.errors import BundleError, StatesError
from preimage.leak.holdings import Told
from preimage.leak.readers import bundles, tensors
from preimage.observations import Observation
from support.refusing import refused
from support.saved_states import (
    LAYERS,
    NOBODY,
    PROMPTS,
    SIZES,
    TOLD,
    WRITERS,
    known,
    passed,
    require_states,
    truth,
    write_safetensors,
)
from support.tiny import tiny


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("told", [TOLD, NOBODY])
def test_all_hidden_states_by_name_with_ids(name: str, told: Told, tmp_path: Path) -> None:
    held = {f"hidden_states.{index}": one for index, one in enumerate(passed().hidden_states)}
    WRITERS[name](tmp_path / name, {**held, "input_ids": torch.tensor(PROMPTS)})
    holding = known(tmp_path / name, told)
    assert holding.kind == "plain states"
    require_states(holding, [0, 1, 2, "final"])
    for prompt, piece in enumerate(holding.pieces):
        (clear,) = piece.clear
        assert (clear.where, clear.token_ids) == ("the tensor input_ids", tuple(PROMPTS[prompt]))


@pytest.mark.parametrize(
    ("named", "layer"),
    [
        ("layer_2", 2), ("layers.02", 2), ("2", 2), ("hidden_states.2", 2), ("hidden_states.3", "final"),
        ("layers.3", 3), ("final", "final"), ("last_hidden_state", "final"), ("hidden_states_final", "final"),
    ],
)  # fmt: skip
def test_names_that_say_a_layer(named: str, layer: Any, tmp_path: Path) -> None:
    held = {named: torch.stack([truth().at(prompt, layer) for prompt in range(2)])}
    write_safetensors(tmp_path / "t.safetensors", held)
    require_states(known(tmp_path / "t.safetensors"), [layer])


def test_the_last_of_some_hidden_states_is_no_final_one(tmp_path: Path) -> None:
    held = {f"hidden_states.{index}": passed().hidden_states[index] for index in range(3)}
    write_safetensors(tmp_path / "t.safetensors", held)
    require_states(known(tmp_path / "t.safetensors"), [0, 1, 2])  # of three blocks, which is known
    del held["hidden_states.0"]
    write_safetensors(tmp_path / "t.safetensors", held)
    require_states(known(tmp_path / "t.safetensors", NOBODY), [1, 2])


def test_an_array_has_the_name_of_its_file(tmp_path: Path) -> None:
    states = passed().hidden_states[2].numpy()
    np.save(tmp_path / "layer_2.npy", states)
    holding = known(tmp_path / "layer_2.npy")
    require_states(holding, [2])
    assert holding.notes == ("The layer is taken from the name of the file.",)
    np.save(tmp_path / "2.npy", np.asfortranarray(states))
    holding = known(tmp_path / "2.npy")
    assert [piece.seen for piece in holding.pieces] == [(), ()]
    assert holding.notes == ("Which layer the states are of stands nowhere: say it.",)
    require_states(known(tmp_path / "2.npy", Told(sizes=SIZES, layers=(2,))), [2])
    np.save(tmp_path / "input_ids.npy", np.array(PROMPTS))
    holding = known(tmp_path / "input_ids.npy")
    assert holding.kind == "plain text"
    assert [piece.clear[0].token_ids for piece in holding.pieces] == [tuple(ids) for ids in PROMPTS]


def test_big_endian_and_half_precision(tmp_path: Path) -> None:
    states = truth().at(0, 2)
    np.save(tmp_path / "layer_2.npy", states.numpy().astype(">f8"))
    (one,) = known(tmp_path / "layer_2.npy").pieces[0].seen
    assert torch.equal(one.read(), states.double())
    torch.save({"layer_2": states.bfloat16()}, tmp_path / "t.pt")
    (one,) = known(tmp_path / "t.pt").pieces[0].seen
    assert torch.equal(one.read(), states.bfloat16())


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in passed().past_key_values.layers]


def flat(names: str) -> dict[str, torch.Tensor]:
    """A cache as a dict: names of keys and values by block."""
    keys, values = names.split()
    return {
        name.format(block): one
        for block, pair in enumerate(pairs())
        for name, one in zip((keys, values), pair, strict=True)
    }


CACHES: dict[str, Callable[[], Any]] = {
    "legacy": lambda: tuple(pairs()),
    "lists": lambda: {"key_cache": [k for k, _ in pairs()], "value_cache": [v for _, v in pairs()]},
    "pairs by name": lambda: {"past_key_values": pairs(), "input_ids": torch.tensor(PROMPTS)},
    "dotted": lambda: flat("past_key_values.{}.key past_key_values.{}.value"),
    "behind": lambda: flat("key_cache.{} value_cache.{}"),
    "layers": lambda: flat("layers.{}.keys layers.{}.values"),
    "attention": lambda: flat("model.layers.{}.self_attn.k_cache model.layers.{}.self_attn.v_cache"),
    "short": lambda: flat("k{} v{}"),
    "counted from 1": lambda: {
        f"{half}.{block}": one
        for block, pair in enumerate(pairs(), 1)
        for half, one in zip("kv", pair, strict=True)
    },
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_caches(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "cache.pt")
    holding = known(tmp_path / "cache.pt")
    assert holding.kind == "transformers cache"
    for place in ("keys", "values"):
        expected = preimage.states_from(pairs(), tiny("llama"), 2, observe=place)
        for prompt, piece in enumerate(holding.pieces):
            seen = {(one.layer, one.observation.place): one for one in piece.seen}
            assert len(seen) == 6
            assert torch.equal(seen[2, place].read(), expected.at(prompt, 2))
            assert seen[2, place].observation == Observation(place)
    before = known(tmp_path / "cache.pt", Told(sizes=SIZES, rotary="before")).pieces[0].seen
    assert {one.observation.rotary for one in before if one.observation.place == "keys"} == {"before"}


def test_lists_without_names(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save(passed().hidden_states, path)
    require_states(known(path), [0, 1, 2, "final"])
    assert known(path, NOBODY).pieces[0].seen == ()
    assert "Which layers the 4 tensors in the list are of stands nowhere" in known(path, NOBODY).notes[0]
    torch.save({"hidden_states": [passed().hidden_states[index] for index in (1, 2)]}, path)
    require_states(known(path, Told(sizes=SIZES, layers=(1, 2))), [1, 2])
    ragged = [truth().at(0, 2), truth().at(1, 2)[:3]]
    torch.save(ragged, path)
    holding = known(path, Told(layers=(2,)))
    assert [piece.tokens for piece in holding.pieces] == [5, 3]
    assert torch.equal(holding.pieces[1].seen[0].read(), ragged[1])


def test_several_layers_in_one_tensor(tmp_path: Path) -> None:
    path, hidden = tmp_path / "t.safetensors", passed().hidden_states
    write_safetensors(path, {"hidden_states": torch.stack(hidden)})
    require_states(known(path), [0, 1, 2, "final"])
    two = Told(sizes=SIZES, layers=(1, 2))
    write_safetensors(path, {"hidden_states": torch.cat(hidden[1:3], dim=-1)})
    require_states(known(path, two), [1, 2])
    assert known(path).pieces[0].seen == ()
    by_token = torch.stack([one[0] for one in hidden[1:3]], dim=1)  # position x layer x d
    write_safetensors(
        path, {"hidden_states": by_token, "input_ids": torch.tensor(PROMPTS[0]), "note": torch.ones(3)}
    )
    (piece,) = known(path, two).pieces
    assert [torch.equal(one.read(), truth().at(0, one.layer)) for one in piece.seen] == [True, True]
    assert piece.clear[0].token_ids == tuple(PROMPTS[0])


def test_training_samples_of_drafts(tmp_path: Path) -> None:
    hidden = passed().hidden_states
    sample = {
        "input_ids": torch.tensor(PROMPTS[0]),
        "loss_mask": torch.ones(5, dtype=torch.long),
        "hidden_state": hidden[-1][:1],
        "aux_hidden_state": torch.cat([hidden[2], hidden[1], hidden[1]], dim=-1)[:1],
    }
    torch.save(sample, tmp_path / "data_0.ckpt")
    holding = known(tmp_path / "data_0.ckpt", Told(sizes=SIZES, layers=(2, 1, 0)))
    assert holding.kind == "training sample of a draft model"
    (piece,) = holding.pieces
    assert [one.layer for one in piece.seen] == ["final", 2, 1, 0]
    for one, expected in zip(piece.seen, (hidden[-1], hidden[2], hidden[1], hidden[1]), strict=True):
        assert torch.equal(one.read(), expected[0])
    assert piece.clear[0].token_ids == tuple(PROMPTS[0])
    assert "those that SGLang takes by itself are assumed" in known(tmp_path / "data_0.ckpt").notes[0]
    (piece,) = known(tmp_path / "data_0.ckpt", NOBODY).pieces
    assert [one.layer for one in piece.seen] == ["final"]


def test_codes_of_8_bits_with_scales(tmp_path: Path) -> None:
    states = truth().at(0, 2)
    scale = states.abs().amax(dim=1) / 127
    codes = (states / scale[:, None]).round().to(torch.int8)
    held = {"layer_2": codes, "scale": scale, "input_ids": torch.tensor(PROMPTS[0], dtype=torch.int8)}
    write_safetensors(tmp_path / "t.safetensors", held)
    (piece,) = known(tmp_path / "t.safetensors").pieces
    assert piece.clear[0].token_ids == tuple(PROMPTS[0])  # which no scale is of
    (one,) = piece.seen
    assert torch.allclose(one.read(), states, atol=float(scale.max()) / 2 * 1.001)


def test_padding_is_left_out(tmp_path: Path) -> None:
    ids, mask = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)
    states = torch.zeros(2, 7, 32)
    for prompt, start in enumerate((2, 0)):
        ids[prompt, start : start + 5] = torch.tensor(PROMPTS[prompt])
        mask[prompt, start : start + 5] = 1
        states[prompt, start : start + 5] = truth().at(prompt, 2)
    held = {"layer_2": states, "attention_mask": mask, "input_ids": ids}
    torch.save(held, tmp_path / "t.pt")
    holding = known(tmp_path / "t.pt")
    require_states(holding, [2])
    assert [piece.clear[0].token_ids for piece in holding.pieces] == [tuple(one) for one in PROMPTS]
    held["attention_mask"][0, 4] = 0
    torch.save(held, tmp_path / "t.pt")
    error = refused(StatesError, lambda: tensors.read(tmp_path / "t.pt", TOLD))
    assert error.message == "attention_mask in t.pt leaves prompt 0 empty or with holes."


def test_text_and_ids_that_stand_beside(tmp_path: Path) -> None:
    path, states = tmp_path / "t.safetensors", truth().at(0, 2)
    write_safetensors(path, {"layer_2": states}, prompt="a secret", token_ids="[1, 2]", note="nothing")
    (tmp_path / "t.json").write_text('{"request": {"messages": [{"role": "user", "content": "another"}]}}')
    (tmp_path / "t.txt").write_text("and one more")
    (tmp_path / "t.jsonl").write_text('{"seed": 1}\n')
    (tmp_path / "other.json").write_text('{"prompt": "not of this file"}')
    holding = known(path)
    assert holding.paths == (path, tmp_path / "t.json", tmp_path / "t.txt")
    told = {one.where: one.text or one.token_ids for one in holding.pieces[0].clear}
    assert told == {
        "beside the tensors, prompt": "a secret",
        "beside the tensors, token_ids": (1, 2),
        "the file t.json, request, messages": "another",
        "the file t.txt": "and one more",
    }
    torch.save({"layer_2": states, "prompt": "in a dict", "input_ids": PROMPTS[0]}, tmp_path / "d.pt")
    told = {one.where: one.text or one.token_ids for one in known(tmp_path / "d.pt").pieces[0].clear}
    assert told == {
        "beside the tensors, prompt": "in a dict",
        "beside the tensors, input_ids": tuple(PROMPTS[0]),
    }
    np.savez(tmp_path / "n.npz", layer_2=passed().hidden_states[2].numpy(), prompts=np.array(["one", "two"]))
    holding = known(tmp_path / "n.npz")
    assert [one.text for one in holding.pieces[0].clear] == ["one", "two"]
    assert [len(piece.seen) for piece in holding.pieces] == [0, 1, 1]


def test_a_link_beside_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/s.json").write_text('{"prompt": "of somebody else"}')
    (tmp_path / "t.json").symlink_to(tmp_path / "elsewhere/s.json")
    torch.save({"layer_2": truth().at(0, 2)}, tmp_path / "t.pt")
    assert known(tmp_path / "t.pt").pieces[0].clear == ()


def test_bundles(tmp_path: Path) -> None:
    truth().save(tmp_path / "all")
    holding = bundles.read(tmp_path / "all", NOBODY)
    assert holding is not None
    assert holding.kind == "preimage bundle"
    require_states(holding, LAYERS)
    assert [piece.clear[0].token_ids for piece in holding.pieces] == [tuple(ids) for ids in PROMPTS]
    truth().save(tmp_path / "withheld", withhold_ids=True)
    holding = bundles.read(tmp_path / "withheld", NOBODY)
    assert holding is not None
    assert [piece.clear for piece in holding.pieces] == [(), ()]
    raw = (tmp_path / "all/states.safetensors").read_bytes()
    (tmp_path / "all/states.safetensors").write_bytes(raw[:-1])
    refused(BundleError, lambda: bundles.read(tmp_path / "all", NOBODY))
    assert bundles.read(tmp_path, NOBODY) is None
