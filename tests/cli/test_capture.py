"""``preimage capture``: from prompts or a tensor to a bundle."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import preimage
from support.commands import WIDTH, Typed


def test_capture(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    out = tmp_path / "b"
    texts = ["--text", "the cat", "--text", "a dog"]
    code, found = document("capture", "--model", model, *texts, "--layers", "1,final", "--out", out)
    assert code == 0
    assert (found["schema"], found["command"], found["bundle"]) == ("preimage/9", "capture", str(out))
    assert (found["prompts"], found["layers"], found["positions"]) == (2, [1, "final"], "all")
    assert found["noise_floor"].keys() == {"1", "final"}
    states, loaded = preimage.open_states(out), preimage.load(model)
    assert found["model"] == states.model == loaded.identity.to_dict()
    expected = preimage.capture(loaded, ["the cat", "a dog"], [1, "final"])
    assert states.token_ids == expected.token_ids
    assert torch.equal(states.last("final"), expected.last("final"))
    code, found = document("capture", "--model", model, *texts, "--out", out)
    assert code == 2
    assert found["error"]["message"] == f"{out} already holds a bundle."
    code, text, err = run("capture", "--model", model, *texts, "--layers", "1", "--out", tmp_path / "c")
    assert code == 0
    assert f"preimage invert {tmp_path / 'c'} --layer 1" in text
    assert err == ""


def test_options_of_capture_reach_the_library(document: Any, model: str, tmp_path: Path) -> None:
    given = ["--prompts", "random", "--count", 3, "--length", 5, "--seed", 7, "--positions", "last"]
    more = ["--dtype", "bfloat16", "--device", "cpu", "--batch-tokens", 10, "--withhold-ids", "--no-bos"]
    code, _ = document("capture", "--model", model, *given, *more, "--layers", "0-1", "--out", tmp_path / "b")
    assert code == 0
    states = preimage.open_states(tmp_path / "b")
    assert (len(states), states.lengths, states.layers) == (3, (5, 5, 5), (0, 1))
    assert (states.positions, states.dtype, states.token_ids) == ("last", torch.bfloat16, None)


def test_capture_from_a_tensor(document: Any, model: str, tmp_path: Path) -> None:
    loaded = preimage.load(model)
    truth = preimage.capture(loaded, ["the cat sat"], 2)
    save_file({"h": truth.at(0, 2).clone(), "k": torch.zeros(3, WIDTH)}, tmp_path / "t.safetensors")
    np.save(tmp_path / "t.npy", truth.at(0, 2)[None].numpy())
    for number, source in enumerate((["t.safetensors", "--key", "h"], ["t.npy"])):
        out = tmp_path / f"b{number}"
        given = ["--from-tensor", tmp_path / source[0], *source[1:], "--layer", 2, "--model", model]
        code, found = document("capture", *given, "--out", out)
        assert code == 0
        assert (found["model"], found["prompts"], found["layers"]) == (None, 1, [2])
        assert torch.equal(preimage.open_states(out).at(0, 2), truth.at(0, 2))
        code, found = document("invert", out, "--model", model)
        assert code == 0
        assert found["results"][0]["token_ids"] == list(truth.token_ids[0])
        assert found["results"][0]["text"] == "<s>the cat sat"
    code, found = document("capture", *given, "--out", out)
    assert code == 2
    assert found["error"]["code"] == "bad_bundle"


def test_keys_are_captured_and_inverted_blind(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["capture", "--model", model, "--text", "the cat sat", "--observe", "keys"]
    for number, (rotary, layers) in enumerate((("after", [1, 2]), ("before", [2]))):
        out, spec = tmp_path / f"b{number}", ",".join(map(str, layers))
        more = ["--rotary", rotary, "--layers", spec, "--withhold-ids", "--out", out]
        code, found = document(*given, *more)
        assert code == 0
        told = {name: found["observation"][name] for name in ("place", "rotary")}
        assert (found["layers"], told) == (layers, {"place": "keys", "rotary": rotary})
        code, found = document("invert", out, "--layer", 2)
        assert code == 0
        assert found["results"][0]["text"] == "<s>the cat sat"
    code, found = document(*given, "--out", tmp_path / "all")
    assert (code, found["layers"]) == (0, [1, 2, 3])
    code, text, _ = run(*given, "--layers", 1, "--out", tmp_path / "said")
    assert code == 0
    assert "keys of 1 prompts" in text


def test_keys_from_a_tensor(document: Any, model: str, tmp_path: Path) -> None:
    truth = preimage.capture(preimage.load(model), ["the cat sat"], 2, observe="values")
    np.save(tmp_path / "t.npy", truth.at(0, 2).numpy())
    given = ["--from-tensor", tmp_path / "t.npy", "--observe", "values", "--model", model]
    code, found = document("capture", *given, "--layer", 2, "--out", tmp_path / "b")
    assert (code, found["observation"]["place"]) == (0, "values")
    code, found = document("invert", tmp_path / "b", "--model", model)
    assert (code, found["results"][0]["token_ids"]) == (0, list(truth.token_ids[0]))
    code, found = document("capture", *given, "--layer", 0, "--out", tmp_path / "c")
    assert (code, found["error"]["code"]) == (2, "bad_option")


def test_what_cannot_be_observed_is_refused(document: Any, model: str, tmp_path: Path) -> None:
    given = ["capture", "--model", model, "--text", "the cat", "--out", tmp_path / "b"]
    for more, words in (
        (["--observe", "queries"], "'queries' is not known"),
        (["--observe", "values", "--rotary", "before"], "values has no rotary positions"),
        (["--observe", "keys", "--rotary", "during"], "'during' is not known"),
        (["--observe", "keys", "--layers", "0"], "Layer 0 has no keys"),
        (["--observe", "keys", "--layers", "1,final"], "Layer final has no keys"),
    ):
        code, found = document(*given, *more)
        assert (code, words in found["error"]["message"]) == (2, True)
    assert not (tmp_path / "b").exists()


def test_a_device_map_and_a_short_dtype_reach_the_library(document: Any, model: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not there; run `make setup`")
    given = ["--model", model, "--text", "the cat", "--layers", 2]
    made = {}
    for name, more in {"plain": ["--device", "cpu"], "spread": ["--device-map", "auto"]}.items():
        code, made[name] = document("capture", *given, *more, "--dtype", "bf16", "--out", tmp_path / name)
        assert code == 0
    assert made["plain"]["model"] == made["spread"]["model"]
    assert made["plain"]["model"]["dtype"] == "bfloat16"
    code, found = document(
        "capture", *given, "--device-map", "auto", "--device", "cpu", "--out", tmp_path / "c"
    )
    assert (code, found["error"]["code"]) == (2, "bad_option")


def test_large_weights_are_announced_and_too_large_ones_refused(
    run: Typed, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "preimage")
    monkeypatch.setattr("preimage.models.memory._LARGE", 1000)
    given = ["capture", "--model", model, "--text", "the cat", "--layers", 2, "--device", "cpu", "--json"]
    code, out, _ = run(*given, "--out", tmp_path / "b")
    assert (code, json.loads(out)["command"]) == (0, "capture")
    assert [line for line in caplog.messages if "weights in float32 on cpu" in line]
    monkeypatch.setattr("preimage.models.memory.free_bytes", lambda _: 1000)
    code, out, _ = run(*given, "--out", tmp_path / "c")
    assert (code, json.loads(out)["error"]["code"]) == (2, "bad_model")
