"""``preimage lens``: a training and what it reached, and lenses handed on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from preimage import training
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


@pytest.fixture
def trained(document: Any, model: str, tmp_path: Path) -> Path:
    """A lens of layer 2."""
    path = tmp_path / "my.safetensors"
    given = ["lens", "train", "--model", model, "--layer", 2, "--prompts", "random", "--steps", 3]
    code, _ = document(*given, "--batch-tokens", 64, "--rank", 4, "--hidden", 8, "--out", path)
    assert code == 0
    return path


def test_push_verify_and_pull(document: Any, run: Typed, model: str, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lenses"
    code, pushed = document("lens", "push", trained, "--to", folder)
    assert (code, pushed["kind"], len(pushed["lenses"])) == (0, "folder", 1)
    (lens,) = pushed["lenses"]
    code, out, _ = run("lens", "push", trained, "--to", folder)  # once more: it is replaced by itself
    assert (code, out.splitlines()) == (
        0,
        [f"pushed to the folder {folder}:", f"layer 2 of {model}: {lens['file']}"],
    )
    assert json.loads((folder / "lenses.json").read_text())["lenses"] == [lens]
    code, found = document("lens", "verify", folder, "--model", model)
    assert (code, found["holds"]) == (0, True)
    assert found["lenses"][0]["measured"]["prose"]["rank0"] == lens["held_out"]["prose"]["rank0"]
    code, out, _ = run("lens", "verify", folder, "--model", model)
    share = f"{lens['held_out']['prose']['rank0']:.2%}"
    assert f"  held-out prose: {share} named first, {share} stated" in out.splitlines()
    code, pulled = document("lens", "pull", "--from", folder, "--model", model, "--layer", 2)
    assert (code, pulled["kind"]) == (0, "folder")
    kept = Path(pulled["lenses"][0]["path"])
    assert kept.read_bytes() == trained.read_bytes()
    kept.unlink()  # other tests share the cache
    code, out, _ = run("lens", "pull", "--from", folder, "--all")
    assert (code, out.splitlines()) == (
        0,
        [f"pulled from the folder {folder}:", f"layer 2 of {model}: {kept}"],
    )
    kept.unlink()


def test_what_does_not_hold_is_exit_code_1(
    document: Any, run: Typed, model: str, folders: dict[str, Path], trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lenses"
    _, pushed = document("lens", "push", trained, "--to", folder)
    file = folder / pushed["lenses"][0]["file"]
    code, found = document("lens", "pull", "--from", folder, "--model", folders["other"])
    assert (code, found["error"]["code"]) == (2, "bad_model")
    assert f"it has lenses for {model} (weights " in found["error"]["message"]
    code, found = document("lens", "verify", trained, "--model", folders["other"])
    assert (code, found["holds"]) == (1, False)
    file.write_bytes(file.read_bytes()[:-1])
    code, found = document("lens", "verify", folder)
    assert (code, found["holds"], found["lenses"][0]["holds"]) == (1, False, False)
    code, out, _ = run("lens", "verify", folder)
    assert code == 1
    assert out.startswith(f"{file.name}: it has {file.stat().st_size} bytes, the registry says ")
    code, found = document("lens", "pull", "--from", folder, "--model", model)
    assert (code, found["error"]["code"]) == (2, "bad_model")
    assert "bytes, the registry says" in found["error"]["message"]
    for wrong in (["push", tmp_path / "nowhere", "--to", folder], ["verify", tmp_path / "nowhere"]):
        code, found = document("lens", *wrong)
        assert (code, found["error"]["code"]) == (2, "bad_model")
    code, found = document("lens", "pull", "--from", folder, "--all", "--layer", 2)
    assert (code, found["error"]["code"]) == (2, "bad_option")
    code, found = document("lens", "push", trained, "--to", "owner/lenses")  # offline
    assert (code, found["error"]["code"]) == (2, "bad_model")
    assert "the hub repository owner/lenses cannot be written offline" in found["error"]["message"]


def test_a_lens_given_by_its_file(document: Any, model: str, trained: Path, tmp_path: Path) -> None:
    given = ["invert", "--model", model, "--text", "the cat", "--lens", trained]
    code, found = document(*given, "--layer", 1)
    assert code == 0
    assert (found["results"][0]["text"], found["results"][0]["proposer"]) == ("<s>the cat", "lens-2")
    refusals = {
        "bad_option": [["--layer", 3], ["--method", "sipit"], ["--proposers", "codebook"], ["--lens", "no"]],
        "bad_model": [["--lens", tmp_path / "empty"]],
    }
    (tmp_path / "empty").write_bytes(b"")
    for kind, wrong in refusals.items():
        for one in wrong:
            code, found = document(*given, *one)
            assert (code, found["error"]["code"]) == (2, kind), one


def test_a_lens_of_before_says_nothing_of_its_tokenizer(run: Typed, document: Any, tmp_path: Path) -> None:
    _, listed = document("lens", "list")
    (shipped, *_) = [lens for lens in listed["lenses"] if lens["model"] == "smollm2"]
    with safe_open(shipped["path"], framework="pt") as file:
        about = json.loads(file.metadata()["about"]) | {"schema": "preimage/1", "tokenizer_hash": None}
    older = tmp_path / "older.safetensors"
    save_file(load_file(shipped["path"]), older, {"about": json.dumps(about)})
    code, found = document("lens", "info", older)
    assert (code, found["tokenizer_hash"]) == (0, None)
    code, out, _ = run("lens", "info", older)
    assert (code, "tokenizer: unknown" in out.splitlines()) == (0, True)


def test_a_lens_is_trained_first_where_that_is_asked_for(
    run: Typed, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is a real one, of few steps."""
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))
    small = training.LensOptions(steps=20, batch_tokens=128, length=8, rank=8, hidden=16)
    monkeypatch.setattr(training, "train_lens", partial(training.train_lens, options=small), raising=False)
    given = ["invert", "--model", folders["model"], "--text", "the cat", "--layer", 1, "--json"]
    for wanted, lenses in (([], 0), (["--no-train-lens"], 0), (["--train-lens"], 1), (["--train-lens"], 1)):
        before = len(list(tmp_path.rglob("lenses/**/*.safetensors")))
        code, out, err = run(*given, *wanted)
        assert code == 0
        assert len(list(tmp_path.rglob("lenses/**/*.safetensors"))) == lenses
        assert ("One is trained first" in err) == (lenses > before)
        assert (json.loads(out)["results"][0]["proposer"] == "lens-1") == bool(lenses)


@pytest.mark.parametrize(
    "other", [("--method", "sipit"), ("--proposers", "codebook"), ("--lens", "x.safetensors")]
)
def test_a_lens_is_not_trained_for_those_who_chose_something_else(
    run: Typed, folders: dict[str, Path], other: tuple[str, str]
) -> None:
    code, out, err = run(
        "invert", "--model", folders["model"], "--text", "the cat", "--layer", 1, "--train-lens", *other
    )
    assert (code, out) == (2, "")
    assert "--train-lens needs the fast method and its own choice." in " ".join(err.split())
