"""``preimage lens``: a training and what it reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.commands import Typed


def test_lens(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["lens", "train", "--model", model, "--layer", 1, "--prompts", "random", "--steps", 3]
    given += ["--batch-tokens", 64, "--rank", 4, "--hidden", 8]
    code, found = document(*given, "--out", tmp_path / "lens.safetensors")
    assert code == 0
    assert found["layer"] == 1
    assert 0 <= found["held_out"]["random"]["rank0"] <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["lens.safetensors"]  # no checkpoint is left
    code, about = document("lens", "info", tmp_path / "lens.safetensors")
    assert (code, about["training"]["steps"], about["held_out"]) == (0, 3, found["held_out"])
    code, _ = document(*given)
    assert code == 0
    code, listed = document("lens", "list")
    assert about["weight_hash"] in [lens["weight_hash"] for lens in listed["lenses"]]
    code, found = document("lens", "info", tmp_path / "nowhere")
    assert (code, found["error"]["code"]) == (2, "bad_model")
    code, found = document("lens", "train", "--model", model, "--layer", 99)
    assert (code, found["error"]["code"]) == (2, "bad_layer")
    code, out, _ = run("lens", "list")
    assert (code, "layer" in out) == (0, True)
    code, out, _ = run("lens", "info", tmp_path / "lens.safetensors")
    assert code == 0
    lines = out.splitlines()
    assert lines[2:4] == ["layer: 1", "place: residual"]
    assert any(line.startswith("training: steps 3, batch tokens 64, ") for line in lines)
    share = about["held_out"]["random"]["rank0"]
    assert any(line.startswith(f"held-out random: {share:.2%} named first, ") for line in lines)
    assert run(*given)[1].splitlines()[-1] == lines[-1]
    assert not set("{}'") & set(out.replace(str(tmp_path), ""))  # words, not Python


def test_a_lens_for_keys(document: Any, run: Typed, model: str) -> None:
    given = ["lens", "train", "--model", model, "--layer", 1, "--observe", "keys", "--neighbours", 2]
    given += ["--steps", 3, "--batch-tokens", 64, "--rank", 4, "--hidden", 8, "--sampled-tokens", 100]
    code, found = document(*given)
    assert (code, found["layer"], found["place"]) == (0, 1, "keys")
    assert Path(found["path"]).name == "layer-1-keys.safetensors"
    code, about = document("lens", "info", found["path"])
    assert (about["place"], about["shape"]["neighbours"]) == ("keys", 2)
    assert (about["training"]["text"], about["training"]["sampled_tokens"]) == ("self", 100)
    code, listed = document("lens", "list")
    assert (1, "keys") in [(lens["layer"], lens["place"]) for lens in listed["lenses"]]
    assert f"lens for keys of layer 1 in {found['path']}" in run(*given)[1].splitlines()
    Path(found["path"]).unlink()  # other tests share the cache
