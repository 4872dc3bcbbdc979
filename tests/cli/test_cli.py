"""The command line: one document, one exit code, one line of error, work that continues."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import preimage
from preimage.bench import inverting
from preimage.cli import doctor, main
from preimage.cli.doctor import _cache
from preimage.cli.terminal import printable
from preimage.errors import RunFolderError
from preimage.inversion.result import Inversion
from preimage.states import States
from preimage.states.layout import Layout, group_by_length, tensor_name
from preimage.states.states import MemoryStore
from preimage.storage import Run, dumps
from support.folders import VOCABULARY, make_folder
from support.surroundings import PYTHON
from support.tiny import build, random_ids

TENSORS, MANIFEST = "states.safetensors", "manifest.json"
LAYERS, WIDTH, CONTEXT = 3, 32, 128


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Noise floors of tiny models stay out of the user's cache."""
    monkeypatch.setenv("PREIMAGE_CACHE", str(cache))
    return cache


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: the one that is used, another of its shape, and a wider one."""
    root = tmp_path_factory.mktemp("models")
    return {
        "model": make_folder(root / "model"),
        "other": make_folder(root / "other", seed=1),
        "wide": make_folder(root / "wide", hidden_size=64),
    }


@pytest.fixture
def model(folders: dict[str, Path], own_cache: Path) -> str:
    return str(folders["model"])


@pytest.fixture
def bundle(model: str, tmp_path: Path) -> Path:
    states = preimage.capture(preimage.load(model), ["the cat", "a dog"], [1, 2])
    return states.save(tmp_path / "bundle")


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: object) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Typed:
    """The exit code of a command, its stdout and its stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def document(run: Typed) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code of a command, and the one document it prints with --json."""

    def call(*argv: object) -> tuple[int, dict[str, Any]]:
        code, out, _ = run(*argv, "--json")
        found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(found, dict)
        assert out.isascii()
        assert out.endswith("}\n")
        return code, found

    return call


def process(*argv: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "preimage", *map(str, argv)],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


# --- one document (C1) and the exit codes (C2) ------------------------------------------------


def test_doctor(document: Any, run: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = document("doctor")
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/1", "doctor")
    checks = {check["check"]: check for check in found["checks"]}
    assert {"python", "preimage", "torch", "device", "cache", "default model", "extra data"} <= checks.keys()
    assert checks["torch"] == {"check": "torch", "ok": True, "found": torch.__version__}
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "empty"))
    code, found = document("doctor")
    assert code == 1  # done, and something is missing
    missing = [check for check in found["checks"] if not check["ok"]]
    assert [check["check"] for check in missing] == ["default model"]
    assert "preimage models --fetch smollm2" in missing[0]["found"]
    assert list(tmp_path.iterdir()) == []
    code, out, _ = run("doctor")
    assert code == 1
    assert "preimage models --fetch smollm2" in out


def test_doctor_tries_to_write_the_cache(
    document: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where permissions say nothing: below a file, in a folder of the system, on a disk that is full."""
    (tmp_path / "file").write_text("")
    for place in (Path("/proc/preimage-test"), tmp_path / "file" / "cache"):
        monkeypatch.setenv("PREIMAGE_CACHE", str(place))
        name, ok, said = _cache()
        assert (name, ok) == ("cache", False)
        assert said.startswith(f"{place} cannot be written")
    code, found = document("doctor")
    assert code == 1
    assert {"check": "cache", "ok": False, "found": said} in found["checks"]
    (tmp_path / "cache" / "noise").mkdir(parents=True)
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path / "cache"))
    assert _cache() == ("cache", True, str(tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("*")) == [tmp_path / "cache" / "noise"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        full = _cache()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full[1] is False


def test_doctor_says_where_half_precision_crashes(
    document: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def dies(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, -signal.SIGILL)

    monkeypatch.setattr(doctor.subprocess, "run", dies)
    monkeypatch.setattr(doctor.Path, "read_text", lambda *_, **__: "flags: amx_bf16")
    code, found = document("doctor")
    assert code == 0  # float32 works
    (check,) = [check for check in found["checks"] if check["check"] == "extra bfloat16"]
    assert check["ok"] is False
    assert "ONEDNN_MAX_CPU_ISA" in check["found"]


def test_models(document: Any, run: Typed, model: str) -> None:
    code, found = document("models")
    assert code == 0
    assert [alias["name"] for alias in found["aliases"]] == ["smollm2"]
    assert len(found["tested_architectures"]) == 12
    code, found = document("models", model)
    assert code == 0
    assert found["model"] == preimage.load(model).identity.to_dict() | {"max_length": CONTEXT}
    code, found = document("models", "--fetch", model)
    assert (code, found["path"]) == (0, model)
    code, out, err = run("models", model)
    assert code == 0
    assert f"d_model: {WIDTH}" in out.splitlines()
    assert err == ""
    for argv in (["models", "no-such-model"], ["models", "--fetch", "no-such-model"]):
        code, found = document(*argv)
        assert code == 2
        assert found["error"]["code"] == "bad_model"


def test_capture(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    out = tmp_path / "b"
    texts = ["--text", "the cat", "--text", "a dog"]
    code, found = document("capture", "--model", model, *texts, "--layers", "1,final", "--out", out)
    assert code == 0
    assert (found["schema"], found["command"], found["bundle"]) == ("preimage/1", "capture", str(out))
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


def test_invert_text(document: Any, run: Typed, model: str) -> None:
    given = ["--model", model, "--text", "the cat", "--text", "a dog", "--layer", 2]
    for method in ("sipit", "brute-force"):
        code, found = document("invert", *given, "--method", method)
        assert code == 0
        assert (found["schema"], found["command"]) == ("preimage/1", "invert")
        assert found["model"] == preimage.load(model).identity.to_dict()
        assert [result["text"] for result in found["results"]] == ["<s>the cat", "<s>a dog"]
        for index, result in enumerate(found["results"]):
            assert (result["index"], result["exact"], result["status"]) == (index, True, "recovered")
            assert (result["layer"], result["method"]) == (2, method)
            assert len(result["positions"]) == len(result["token_ids"])
            assert result["seconds"] > 0
            assert result["forward_tokens"] > 0
            assert result["margin"] > 0
    code, out, err = run("invert", *given)
    assert code == 0
    assert "<s>the cat" in out
    assert "recovered" in out
    assert err == ""  # no bar where stderr is no terminal


def test_invert_a_bundle(document: Any, model: str, bundle: Path) -> None:
    code, found = document("invert", bundle, "--layer", 1)  # its model is named in the bundle
    assert code == 0
    assert [result["text"] for result in found["results"]] == ["<s>the cat", "<s>a dog"]
    assert [result["exact"] for result in found["results"]] == [True, True]
    code, found = document("invert", bundle)
    assert code == 2
    assert found["error"] == {
        "code": "bad_layer", "message": "These states hold 2 layers.", "hint": "Choose one of 1, 2.",
    }  # fmt: skip


def test_what_is_not_recovered_is_exit_code_1(
    document: Any, run: Typed, folders: dict[str, Path], bundle: Path
) -> None:
    given = ["invert", bundle, "--model", folders["other"], "--any-model", "--layer", 1]
    given += ["--method", "brute-force"]
    code, found = document(*given)
    assert code == 1
    for result in found["results"]:
        assert (result["status"], result["exact"], result["token_ids"]) == ("not_recovered", False, [])
        assert result["failed_position"] == 0
        assert result["failed_distance"] > 0
    code, out, _ = run(*given)
    assert code == 1
    assert "No token of the vocabulary fits at position 0" in out
    code, found = document("invert", bundle, "--layer", 1, "--max-tests", 1, "--seed", 3)
    assert code == 1
    assert "the budget of 1 tests is spent" in found["results"][0]["reason"]


def test_bench_capture(document: Any, run: Typed, model: str) -> None:
    given = ["bench", "capture", "--model", model, "--count", 2, "--length", 4, "--rounds", 1]
    code, found = document(*given)
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/1", "bench capture")
    assert found["fraction_of_forward"] == found["forward_seconds"] / found["capture_seconds"]
    assert (found["tokens"], found["layers"]) == (8, LAYERS + 2)
    assert found["hardware"]["torch"] == torch.__version__
    code, out, _ = run(*given)
    assert code == 0
    assert out.startswith("fraction of forward: ")
    code, found = document("bench", "capture", "--model", model, "--rounds", 0)
    assert code == 2
    assert found["error"]["code"] == "bad_option"


def test_bench_inversion(document: Any, run: Typed, model: str) -> None:
    given = [
        "bench",
        "inversion",
        "--model",
        model,
        "--layers",
        "1",
        "--prose",
        0,
        "--code",
        0,
        "--random",
        2,
    ]
    given += ["--length", 6, "--sipit-prompts", 1, "--sipit-length", 3]
    code, found = document(*given)
    assert code == 0
    row = found["layers"]["1"]
    assert (row["exact"], row["prompts"]) == (2, 2)
    assert row["ratio_to_forward"] > 0
    assert row["statuses"] == {"recovered": 2}
    assert row["setup_seconds"] >= 0
    assert row["seconds"] == statistics.median(each["seconds"] for each in row["rows"])
    assert row["speedup_over_sipit"] == row["seconds_a_token"]["published"] / row["seconds_a_token"]["fast"]
    assert row["verified_tokens"] == {"fast": 3, "sipit": 3, "published": 3}
    code, out, _ = run(*given)
    assert code == 0
    assert out.startswith("layer 1: 2 of 2 exact (2 recovered), median ")
    code, found = document(*given, "--sipit-seconds", 1e-9)  # stopped before anything was verified
    row = found["layers"]["1"]
    assert (code, row["verified_tokens"]) == (0, {"fast": 3, "sipit": 0, "published": 0})
    assert (row["speedup_over_sipit"], row["speedup_over_cached_sipit"]) == (None, None)
    assert row["seconds_a_token"]["published"] is None
    assert row["sipit_statuses"]["published"] == {"not_recovered": 1}
    code, out, _ = run(*given, "--sipit-seconds", 1e-9)
    assert (code, "not comparable (no token verified in time) with SIPIT" in out) == (0, True)


def test_the_bench_counts_what_is_claimed_and_times_what_was_verified(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, ids = preimage.load(model), tuple(random_ids(6, vocabulary=VOCABULARY))
    (right,) = preimage.invert(loaded, preimage.capture(loaded, [ids], 1))
    other = (*ids[:-1], (ids[-1] + 1) % VOCABULARY)
    for expected, changes in (
        (True, {}),
        (False, {"token_ids": other}),
        (False, {"status": "not_recovered"}),
        (False, {"status": "not_recovered", "alternatives": (ids,)}),
        (True, {"status": "ambiguous", "alternatives": (other, ids), "token_ids": other}),
        (False, {"status": "ambiguous", "alternatives": (other,)}),
    ):
        assert replace(right, **changes).claims(ids) is expected, changes

    def invert(_: object, states: States, layer: int, method: str, **__: object) -> list[Inversion]:
        (length,) = states.lengths
        if method == "fast":
            return [replace(right, seconds=0.6)]
        if length == 6:  # stopped after two tokens and a hundred seconds, most of them for the third
            stopped = {"status": "not_recovered", "token_ids": ids[:2], "seconds": 100.0}
            return [replace(right, **stopped)]
        return [replace(right, token_ids=ids[:2], seconds=3.0)]

    monkeypatch.setattr(inverting, "invert", invert)
    found = inverting._against_sipit(loaded, 1, [ids], 100.0)
    assert found["verified_tokens"] == {"fast": 6, "sipit": 2, "published": 2}
    assert found["seconds_a_token"] == {"fast": 0.6 / 6, "sipit": 1.5, "published": 1.5}
    assert found["speedup_over_sipit"] == 1.5 / (0.6 / 6)


def test_bench_throughput(document: Any, run: Typed, model: str) -> None:
    given = ["bench", "throughput", "--model", model, "--layers", "1,final", "--prose", 0, "--code", 0]
    given += ["--random", 3, "--length", 5, "--rounds", 1]
    code, found = document(*given)
    assert code == 0
    for row in found["layers"].values():
        assert (row["exact"], row["prompts"], row["statuses"]) == (3, 3, {"recovered": 3})
        assert row["setup_seconds"] >= 0
        assert row["fraction_of_forward"] == found["forward_seconds"] / row["seconds"]
    code, out, _ = run(*given)
    assert (code, out.startswith("layer 1: 3 of 3 exact")) == (0, True)
    code, found = document(*given[:-1], 0)
    assert (code, found["error"]["code"]) == (2, "bad_option")
    code, found = document(*given, "--layers", 99)
    assert (code, found["error"]["code"]) == (2, "bad_layer")


def test_bench_pairs(document: Any, run: Typed) -> None:
    given = ["bench", "pairs", "--n", 600, "--d", 12, "--sets", 2, "--rounds", 1]
    code, found = document(*given)
    assert code == 0
    assert found["fraction_of_matmul"] == pytest.approx(found["product_seconds"] / found["seconds"])
    assert found["pairs"] == 600 * 599
    assert found["planted"] == {"sets": 2, "found": 2, "distance": 1e-2}
    code, out, _ = run(*given)
    assert (code, out.startswith("fraction of matmul: ")) == (0, True)
    for wrong in (["--n", 1], ["--device", "toaster"]):
        code, found = document("bench", "pairs", *wrong)
        assert (code, found["error"]["code"]) == (2, "bad_option")


def test_a_proof_is_stored_and_drawn(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["invert", "--model", model, "--prompts", "random", "--count", 1, "--length", 4, "--layer", 1]
    given += ["--prove", "--out", tmp_path / "proof"]
    code, found = document(*given)
    assert code == 0
    (result,) = found["results"]
    assert [p["tolerated_noise"] for p in result["positions"]] == [
        p["margin"] / 2 for p in result["positions"]
    ]
    assert result["margin"] == min(p["margin"] for p in result["positions"])
    assert "Margins at layer 1" in (tmp_path / "proof" / "margins-0.html").read_text(encoding="utf-8")
    code, out, _ = run(*given)
    assert (code, "tolerated D/2" in out) == (0, True)
    code, found = document(*given[:-3], "--proposers", "tea-leaves")
    assert (code, found["error"]["code"]) == (2, "bad_option")


def test_collisions(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    texts, out = ["the cat", "a dog", "the cats sat", "the cat"], tmp_path / "run"
    given = ["collisions", "--model", model, *(part for text in texts for part in ("--text", text))]
    given += ["--layers", "0,2,final", "--hard-bases", 2, "--closest", 2, "--threshold", 0.5]
    code, found = document(*given, "--out", out)
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/1", "collisions")
    options = {"thresholds": (0.5,), "closest": 2, "hard_bases": 2}
    audit = preimage.find_collisions(preimage.load(model), texts, "0,2,final", **options)
    assert found["results"] == json.loads(json.dumps(audit.to_dict()))
    assert (found["results"]["prompts"], found["results"]["duplicates_removed"]) == (3, 1)
    assert [entry["layer"] for entry in found["results"]["layers"]] == [0, 2, "final"]
    for entry in found["results"]["layers"]:
        assert (entry["spacing"]["pairs"], entry["spacing"]["below"].keys()) == (3, {"1e-06", "0.5"})
    assert found["results"]["unexplained"] == 0
    names = ["items.jsonl", "layers.parquet", "record.jsonl", "run.json", "spacing.html"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert "All pairs of 3 prompts" in (out / "spacing.html").read_text(encoding="utf-8")
    assert json.loads((out / "run.json").read_text())["results"] == found["results"]
    before = lines_of(out)
    assert document(*given, "--out", out) == (code, found)
    assert lines_of(out) == before
    code, text, err = run(*given)
    assert (code, err) == (0, "")
    assert "3 prompts of " in text
    assert "3 pairs a layer" in text
    assert "Hard pairs at layer final" in text
    assert "closest at layer final: '<s>" in text
    assert "UNEXPLAINED" not in text
    code, text, _ = run(*given, "--layers", "0", "--text", "the dogs sat")
    assert code == 0
    assert re.search(r"^layer 0, at the noise floor: \d same last token at layer 0$", text, re.MULTILINE)


def test_collisions_at_several_lengths(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["collisions", "--model", model, "--prompts", "random", "--count", 6, "--lengths", "4,8"]
    given += ["--layers", "1,final", "--hard-bases", 0, "--seed", 3]
    code, found = document(*given, "--out", tmp_path / "sweep")
    assert code == 0
    assert found["results"].keys() == {"4", "8"}
    assert [audit["lengths"] for audit in found["results"].values()] == [[4, 4], [8, 8]]
    one = ["--length", 8, "--count", 6, "--prompts", "random", "--layers", "1,final", "--hard-bases", 0]
    code, alone = document("collisions", "--model", model, *one, "--seed", 3)
    assert (code, alone["results"]) == (0, found["results"]["8"])
    for length in (4, 8):
        folder = tmp_path / "sweep" / f"length-{length}"
        assert {"run.json", "layers.parquet", "spacing.html"} <= {path.name for path in folder.iterdir()}
    code, text, _ = run(*given)
    assert code == 0
    assert "6 prompts of 4 tokens" in text
    assert "6 prompts of 8 tokens" in text


def test_prompts_with_the_same_next_token_are_compared(document: Any, model: str) -> None:
    given = ["--prompts", "same-next:arithmetic", "--count", 5, "--layers", 2, "--hard-bases", 0]
    code, found = document("collisions", "--model", model, *given)
    assert code == 0
    (layer,) = found["results"]["layers"]
    assert (layer["spacing"]["pairs"], layer["hard"]) == (10, [])
    assert layer["spacing"]["closest"][0]["first_text"].endswith(" =")


def test_continuations(document: Any, run: Typed, model: str, tmp_path: Path) -> None:
    given = ["continuations", "--model", model, "--text", "the cat", "--text", "a", "--layer", 2]
    code, found = document(*given, "--out", tmp_path / "scan")
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/1", "continuations")
    scan = preimage.scan_continuations(preimage.load(model), ["the cat", "a"], 2, hard_bases=0)
    assert found["results"] == json.loads(json.dumps(scan.to_dict()))
    assert [prefix["text"] for prefix in found["results"]["prefixes"]] == ["<s>the cat", "<s>a"]
    for prefix in found["results"]["prefixes"]:
        assert prefix["spacing"]["states"] == VOCABULARY
        assert prefix["margin"] == prefix["spacing"]["closest"][0]["distance"] > 0
    names = ["items.jsonl", "prefixes.parquet", "record.jsonl", "run.json"]
    assert sorted(path.name for path in (tmp_path / "scan").iterdir()) == names
    code, text, err = run(*given)
    assert (code, err) == (0, "")
    assert f"Every next token at layer 2, {VOCABULARY * (VOCABULARY - 1) // 2} pairs a prefix" in text
    assert "0: …<s>the cat" in text
    assert "1, closest tokens: " in text


def test_the_closest_prompts_of_a_search_are_continued(
    document: Any, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched = ["collisions", "--model", model, "--prompts", "random", "--count", 12, "--length", 5]
    searched += ["--layers", "1,final", "--hard-bases", 0, "--out", tmp_path / "run"]
    code, audit = document(*searched)
    assert code == 0
    pair = audit["results"]["layers"][-1]["spacing"]["closest"][0]
    given = ["continuations", "--model", model, "--audit", tmp_path / "run"]
    code, found = document(*given, "--count", 2)
    assert code == 0
    assert found["results"]["layer"] == "final"
    prefixes = [prefix["prefix"] for prefix in found["results"]["prefixes"]]
    assert prefixes == [pair["first_ids"], pair["second_ids"]]
    code, found = document(*given)
    assert (code, len(found["results"]["prefixes"])) == (0, 10)
    for count in (0, -1):
        code, found = document(*given, f"--count={count}")
        assert (code, found["error"]["message"]) == (2, f"count is {count}.")
    code, found = document(*given, "--text", "x")
    assert (code, found["error"]["hint"]) == (2, "Give one of --text, --audit and --prompts.")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"state": "done"', '"state": "running"'))
    code, found = document(*given)
    assert (code, found["error"]["code"]) == (2, "bad_run_folder")
    assert found["error"]["message"] == f"{tmp_path / 'run'} holds no finished collision search."


def test_a_search_of_one_family_has_nothing_to_continue(
    document: Any, run: Typed, model: str, jsonl: Callable[..., str], tmp_path: Path
) -> None:
    given = ["collisions", "--model", model, "--prompts", jsonl([7, 7], [7, 7, 7]), "--layers", 1]
    given += ["--hard-bases", 0, "--out", tmp_path / "run"]
    code, found = document(*given)
    assert (code, found["results"]["layers"][0]["spacing"]["separation"]) == (0, None)
    assert run(*given)[0] == 0
    code, found = document("continuations", "--model", model, "--audit", tmp_path / "run")
    assert (code, found["error"]["message"]) == (2, "No prompt was given.")


def test_an_unexplained_collision_is_exit_code_1(
    document: Any, run: Typed, own_cache: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "flat")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 0  # every state at "final" is 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    given = ["--model", folder, "--text", "the cat", "--text", "a dog"]
    code, found = document("collisions", *given, "--layers", "2,final", "--hard-bases", 0)
    assert code == 1
    assert [layer["spacing"]["unexplained"] for layer in found["results"]["layers"]] == [0, 1]
    assert found["results"]["unexplained"] == 1
    assert found["results"]["layers"][1]["spacing"]["listed"][0]["explanation"] == "unexplained"
    code, text, _ = run("collisions", *given, "--layers", "2,final", "--hard-bases", 0)
    assert code == 1
    assert "UNEXPLAINED at layer final: '<s>the cat' and '<s>a dog', 0 apart" in text
    assert run("collisions", *given, "--layers", "2", "--hard-bases", 0)[0] == 0
    code, found = document("collisions", *given, "--layers", "final", "--hard-bases", 1)
    assert code == 1
    assert found["results"]["unexplained"] > 1  # hard pairs count too
    code, found = document("continuations", *given[:4], "--closest", 1)
    assert code == 1
    assert found["results"]["unexplained"] == VOCABULARY * (VOCABULARY - 1) // 2
    assert found["results"]["prefixes"][0]["margin"] == 0
    code, text, _ = run("continuations", *given[:4], "--closest", 1)
    assert (code, "0, UNEXPLAINED: " in text) == (1, True)


def test_an_interrupted_search_is_continued_by_the_same_command(
    document: Any, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # C2
    given = ["collisions", "--model", model, "--prompts", "random", "--count", 8, "--length", 5]
    given += ["--hard-bases", 1, "--out", tmp_path / "run"]

    @contextmanager
    def interrupted() -> Iterator[Callable[[int, int, str], None]]:
        def report(done: int, total: int, note: str) -> None:
            if note.startswith("layers compared") and done == 2:
                raise KeyboardInterrupt

        yield report

    with monkeypatch.context() as patch:
        patch.setattr("preimage.cli.collisions.progress_bar", interrupted)
        code, found = document(*given)
    assert (code, found["error"]["code"]) == (130, "interrupted")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "running"
    kept = lines_of(tmp_path / "run")
    assert len(kept) == 2
    code, found = document(*given)
    assert code == 0
    assert lines_of(tmp_path / "run")[:2] == kept
    assert document(*given[:-2]) == (0, found)
    assert not (tmp_path / "run" / "states").exists()


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
    assert "layer: 1" in lines
    assert any(line.startswith("training: steps 3, batch tokens 64, ") for line in lines)
    share = about["held_out"]["random"]["rank0"]
    assert any(line.startswith(f"held-out random: {share:.2%} named first, ") for line in lines)
    assert run(*given)[1].splitlines()[-1] == lines[-1]
    assert not set("{}'") & set(out.replace(str(tmp_path), ""))  # words, not Python


def test_demo_without_its_model(document: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, found = document("demo")
    assert code == 2
    assert "smollm2 is not in the cache" in found["error"]["message"]


@pytest.mark.parametrize(
    "argv",
    [
        ["invert", "--no-such-option"],
        ["no-such-command"],
        ["capture", "--text", "x"],  # --out is missing
        ["invert", "--seed", "many"],
        ["bench"],
        ["bench", "nothing"],
        ["models", "one", "two"],
        ["doctor", "--json=yes"],
    ],
    ids=" ".join,
)
def test_wrong_usage(argv: list[str], document: Any, run: Typed) -> None:
    code, found = document(*argv)
    assert code == 2
    assert found.keys() == {"error"}
    assert found["error"]["code"] == "usage"
    assert found["error"]["message"]
    assert found["error"]["hint"] == "Run it with --help to see what is allowed."
    if argv != ["bench"]:  # which shows its help instead
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1


def test_help_and_nothing_at_all(run: Typed) -> None:
    for argv in ([], ["--help"], ["invert", "--help"], ["bench", "--help"]):
        code, out, err = run(*argv)
        assert code == 0
        assert "Usage: preimage" in out
        assert err == ""


def test_an_interrupt_is_exit_code_130(
    document: Any, run: Typed, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("preimage.models.loading.load", interrupted)
    code, found = document("models", model)
    assert code == 130
    assert found["error"]["code"] == "interrupted"
    code, out, err = run("models", model)
    assert (code, out) == (130, "")
    assert err == ("preimage: Interrupted. A run with --out continues when the same command is run again.\n")


def test_a_bug_is_none_of_the_documented_codes(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("preimage.models.loading.load", broken)
    assert main(["models", model, "--json"]) == 70
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["message"] == "ZeroDivisionError: by hand"
    assert "Traceback" in captured.err


def test_a_missing_extra_is_named(
    document: Any, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # C3
    monkeypatch.setitem(sys.modules, "datasets", None)
    out = tmp_path / "b"
    code, found = document("capture", "--model", model, "--prompts", "datasets:someone/data", "--out", out)
    assert code == 2
    assert found["error"] == {
        "code": "missing_extra",
        "message": "datasets:someone/data needs the datasets package, which is not installed.",
        "hint": 'Install it: pip install "preimage[data]"',
    }
    assert not out.exists()


# --- bad input --------------------------------------------------------------------------------

Case = Callable[[Any], list[object]]


class Given:
    """What the cases below are made of."""

    def __init__(self, folders: dict[str, Path], bundle: Path, jsonl: Callable[..., str], tmp: Path) -> None:
        self.model = folders["model"]
        self.other = folders["other"]
        self.wide = folders["wide"]
        self.bundle = bundle
        self.jsonl = jsonl
        self.tmp = tmp

    def truncated(self) -> Path:
        os.truncate(self.bundle / TENSORS, 100)
        return self.bundle

    def flipped(self) -> Path:
        data = bytearray((self.bundle / TENSORS).read_bytes())
        data[-1] ^= 1
        (self.bundle / TENSORS).write_bytes(data)
        return self.bundle

    def too_long(self) -> Path:
        return States.from_tensor(torch.randn(1, CONTEXT + 1, WIDTH), 1).save(self.tmp / "long")

    def with_nan(self) -> Path:
        tensor = torch.randn(1, 4, WIDTH)
        tensor[0, 2, 5] = float("nan")
        layout = Layout(group_by_length([4]), (1,), "all", WIDTH)
        store = MemoryStore({tensor_name(1, 0): tensor})
        states = States(layout, store, token_ids=None, model=None, noise_floor={}, dtype=torch.float32)
        return states.save(self.tmp / "nan")

    def tensor(self, *shape: int, bad: float | None = None) -> Path:
        tensor = torch.randn(*shape)
        if bad is not None:
            tensor[(1,) * len(shape)] = bad
        save_file({"h": tensor}, self.tmp / "t.safetensors")
        return self.tmp / "t.safetensors"

    def pickled(self) -> Path:
        folder = self.tmp / "pickled"
        folder.mkdir()
        shutil.copy(self.model / "config.json", folder)
        torch.save({}, folder / "pytorch_model.bin")
        return folder

    def untold(self) -> Path:
        return make_folder(self.tmp / "untold", tokenizer=False)

    def unfinished(self) -> Path:
        Run({"command": "collisions"}, self.tmp / "unfinished")
        return self.tmp / "unfinished"

    def file(self, name: str, text: str) -> Path:
        (self.tmp / name).write_text(text)
        return self.tmp / name


INVERT: dict[str, tuple[Case, str]] = {
    "unknown model": (
        lambda g: ["--model", "no/such", "--text", "x"],
        "'no/such' is no alias (smollm2), no file or folder here, and not in the hub's cache (offline).",
    ),
    "missing gguf": (lambda g: ["--model", "no.gguf", "--text", "x"], "There is no file no.gguf."),
    "pickled weights": (lambda g: ["--model", g.pickled(), "--text", "x"], "is a pickled file"),
    "missing prompts": (
        lambda g: ["--model", g.model, "--prompts", "none.txt"],
        "The source of prompts 'none.txt' does not exist.",
    ),
    "layer too deep": (
        lambda g: ["--model", g.model, "--text", "x", "--layer", 4],
        "There is no layer '4'. This model has layers 0..3 and \"final\".",
    ),
    "layer below 0": (lambda g: ["--model", g.model, "--text", "x", "--layer=-1"], "There is no layer '-1'."),
    "layer of a kind": (lambda g: ["--model", g.model, "--text", "x", "--layer", "top"], "no layer 'top'"),
    "two layers": (lambda g: ["--model", g.model, "--text", "x", "--layer", "1,2"], "One layer is needed"),
    "empty prompt": (lambda g: ["--model", g.model, "--text", ""], "prompt 0 is empty text."),
    "empty file": (lambda g: ["--model", g.model, "--prompts", g.file("e.txt", "")], "holds no prompts."),
    "no prompt": (lambda g: ["--model", g.model], "--text and --prompts: neither given."),
    "both": (lambda g: ["--model", g.model, "--text", "x", "--prompts", "random"], "both given."),
    "too long": (
        lambda g: ["--model", g.model, "--text", "word " * 200],
        "this model takes at most 128.",
    ),
    "wrong id": (
        lambda g: ["--model", g.model, "--prompts", g.jsonl([1, 2], {"token_ids": [5, VOCABULARY]})],
        f"line 2 has token id {VOCABULARY} at position 1; this model's ids are 0..{VOCABULARY - 1}.",
    ),
    "negative id": (lambda g: ["--model", g.model, "--prompts", g.jsonl([-1])], "has token id -1"),
    "missing bundle": (lambda g: [g.tmp / "none"], "is not a state bundle: no manifest.json in it."),
    "bundle and text": (lambda g: [g.bundle, "--text", "x"], "A bundle and prompts were given."),
    "bundle of another model": (
        lambda g: [g.bundle, "--model", g.other, "--layer", 1],
        "These states were made by",
    ),
    "bundle of another width": (
        lambda g: [g.bundle, "--model", g.wide, "--layer", 1],
        "These states are 32 wide, those of",
    ),
    "bundle of another dtype": (
        lambda g: [g.bundle, "--layer", 1, "--dtype", "bfloat16"],
        "Load that model with dtype float32",
    ),
    "bundle of more positions": (
        lambda g: [g.too_long(), "--model", g.model, "--layer", 1],
        "Prompt 0 has 129 positions; ",
    ),
    "layer not in the bundle": (lambda g: [g.bundle, "--layer", 3], "Layer 3 was not captured."),
    "truncated bundle": (lambda g: [g.truncated(), "--layer", 1], "has 100 bytes"),
    "damaged bundle": (lambda g: [g.flipped(), "--layer", 1], "fails its checksum."),
    "NaN in a bundle": (
        lambda g: [g.with_nan(), "--model", g.model, "--layer", 1],
        "Prompt 0, layer 1, position 2 holds NaN or infinity.",
    ),
    "NaN where the layer is not said": (lambda g: [g.with_nan(), "--model", g.model], "position 2 holds NaN"),
    "unknown method": (lambda g: ["--model", g.model, "--text", "x", "--method", "luck"], "'luck' is not"),
    "unknown dtype": (lambda g: ["--model", g.model, "--text", "x", "--dtype", "int3"], "'int3' is not"),
    "unknown device": (lambda g: ["--model", g.model, "--text", "x", "--device", "abacus"], "'abacus'"),
    "tolerance 0": (lambda g: ["--model", g.model, "--text", "x", "--tolerance", 0], "tolerance is 0"),
    "tolerance below the floor": (
        lambda g: ["--model", g.model, "--text", "x", "--tolerance", 1e-12],
        "lies below the noise floor",
    ),
    "negative seed": (lambda g: ["--model", g.model, "--text", "x", "--seed=-1"], "seed is -1"),
}
TENSOR: dict[str, tuple[Case, str]] = {
    "missing tensor": (lambda g: [g.tmp / "t.npy", "--layer", 1], "There is no file"),
    "no layer": (lambda g: [g.tensor(3, WIDTH)], "--from-tensor needs --layer."),
    "layer too deep": (lambda g: [g.tensor(3, WIDTH), "--layer", 9], "There is no layer '9'."),
    "NaN": (
        lambda g: [g.tensor(3, WIDTH, bad=float("nan")), "--layer", 1],
        "Prompt 0, layer 1, position 1 holds NaN or infinity.",
    ),
    "infinity": (
        lambda g: [g.tensor(2, 3, WIDTH, bad=float("inf")), "--layer", "final"],
        "Prompt 1, layer final, position 1 holds NaN or infinity.",
    ),
    "another width": (lambda g: [g.tensor(3, 31), "--layer", 1], "states 31 wide, those of"),
    "more positions": (
        lambda g: [g.tensor(2, CONTEXT + 1, WIDTH), "--layer", 1],
        "Prompt 0 has 129 positions",
    ),
    "one axis": (lambda g: [g.tensor(WIDTH), "--layer", 1], "shape (32,) and type torch.float32 holds no"),
    "pickled tensor": (lambda g: [g.pickled() / "pytorch_model.bin", "--layer", 1], "is neither"),
    "text called npy": (lambda g: [g.file("t.npy", "1 2 3"), "--layer", 1], "cannot be read as a plain"),
    "wrong key": (lambda g: [g.tensor(3, WIDTH), "--layer", 1, "--key", "k"], "holds no tensor 'k'."),
}
TWO = ["--text", "x", "--text", "y"]
COLLISIONS: dict[str, tuple[Case, str]] = {
    "one prompt": (lambda g: ["--text", "x"], "1 prompts, 1 of them different."),
    "equal prompts": (lambda g: ["--text", "x", "--text", "x"], "2 prompts, 1 of them different."),
    "empty file": (lambda g: ["--prompts", g.file("e.txt", "")], "holds no prompts."),
    "missing prompts": (lambda g: ["--prompts", "none.txt"], "'none.txt' does not exist."),
    "threshold 0": (lambda g: [*TWO, "--threshold", 0], "A threshold is 0.0."),
    "threshold below 0": (lambda g: [*TWO, "--threshold=-1"], "A threshold is -1.0."),
    "threshold below the floor": (
        lambda g: [*TWO, "--threshold", 1e-8, "--layers", "2,final"],
        "The threshold 1e-08 is below the noise floor of layer 2, ",
    ),
    "layer too deep": (lambda g: [*TWO, "--layers", "0-4"], "There is no layer '0-4'."),
    "closest 0": (lambda g: [*TWO, "--closest", 0], "closest is 0."),
    "hard bases below 0": (lambda g: [*TWO, "--hard-bases=-1"], "hard_bases is -1."),
    "negative seed": (lambda g: [*TWO, "--seed=-1"], "seed is -1."),
    "count of text": (lambda g: [*TWO, "--count", 1], "--count and --length cut --prompts."),
    "lengths of text": (lambda g: [*TWO, "--lengths", "4,8"], "--lengths cuts --prompts."),
    "length and lengths": (lambda g: ["--length", 4, "--lengths", "4,8"], "--lengths cuts --prompts."),
    "lengths that are none": (lambda g: ["--lengths", "4,long"], "--lengths is '4,long'."),
    "length 0": (lambda g: ["--prompts", "random", "--lengths", "4,0"], "length is 0"),
    "too long": (
        lambda g: ["--prompts", "random", "--lengths", "4,129"],
        "length is 129; this model takes at most 128 tokens.",
    ),
    "unequal numbers": (
        lambda g: ["--prompts", g.jsonl(random_ids(40)), "--lengths", "4,10"],
        "The source has 10 at 4, 4 at 10 prompts. Set count to the smallest of these numbers.",
    ),
    "text without a tokenizer": (
        lambda g: ["--prompts", "same-next:arithmetic", "--model", g.untold()],
        "prompt 0 is text, and this model has no tokenizer.",
    ),
    "default without a tokenizer": (lambda g: ["--model", g.untold()], "'default' is text, and this model"),
}
CONTINUATIONS: dict[str, tuple[Case, str]] = {
    "no prefix": (lambda g: [], "A scan needs prefixes."),
    "text and prompts": (lambda g: ["--text", "x", "--prompts", "random"], "A scan needs prefixes."),
    "missing audit": (lambda g: ["--audit", g.tmp / "none"], "cannot be read"),
    "unfinished audit": (lambda g: ["--audit", g.unfinished()], "holds no finished collision search."),
    "layer too deep": (lambda g: ["--text", "x", "--layer", 4], "There is no layer '4'."),
    "two layers": (lambda g: ["--text", "x", "--layer", "1,2"], "One layer is needed"),
    "as long as the model": (
        lambda g: ["--prompts", g.jsonl([3] * 128)],
        "Prefix 0 has 128 tokens, as many as the model takes.",
    ),
    "threshold below the floor": (
        lambda g: ["--text", "x", "--threshold", 1e-12],
        "is below the noise floor of layer final",
    ),
    "closest 0": (lambda g: ["--text", "x", "--closest", 0], "closest is 0."),
}
CASES = {
    **{
        f"{command}, {name}": ([command, "--model", "the model"], *case)
        for command, cases in (("collisions", COLLISIONS), ("continuations", CONTINUATIONS))
        for name, case in cases.items()
    },
    **{f"invert, {name}": (["invert"], *case) for name, case in INVERT.items()},
    **{
        f"capture, {name}": (["capture"], *case)
        for name, case in INVERT.items()
        if name in ("unknown model", "missing gguf", "pickled weights", "missing prompts", "empty prompt",
                    "empty file", "no prompt", "both", "too long", "wrong id", "negative id", "unknown dtype",
                    "unknown device", "negative seed")
    },
    **{f"tensor, {name}": (["capture", "--from-tensor"], *case) for name, case in TENSOR.items()},
    "capture, layer too deep": (
        ["capture"],
        lambda g: ["--model", g.model, "--text", "x", "--layers", "0-4"],
        "There is no layer '0-4'.",
    ),
    "capture, unknown positions": (
        ["capture"],
        lambda g: ["--model", g.model, "--text", "x", "--positions", "some"],
        "positions 'some' is not known.",
    ),
    "capture, layer of a tensor": (
        ["capture"],
        lambda g: ["--model", g.model, "--text", "x", "--layer", "1"],
        "--layer and --key go with --from-tensor.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("command", "case", "message"), CASES.values(), ids=CASES)
def test_bad_input_is_one_line_and_writes_nothing(
    command: list[str],
    case: Case,
    message: str,
    run: Typed,
    folders: dict[str, Path],
    bundle: Path,
    jsonl: Callable[..., str],
    tmp_path: Path,
) -> None:
    given, out = Given(folders, bundle, jsonl, tmp_path), tmp_path / "out"
    argv = [given.model if part == "the model" else part for part in command]
    argv += [*case(given), "--out", out]
    if "--from-tensor" in command:
        argv += ["--model", given.model]
    before = sorted(tmp_path.rglob("*"))
    code, stdout, stderr = run(*argv)
    assert code == 2
    assert stdout == ""
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("preimage: ")
    assert message in stderr
    code, stdout, _ = run(*argv, "--json")
    assert code == 2
    error = json.loads(stdout)["error"]
    assert error.keys() == {"code", "message", "hint"}
    assert stderr == f"preimage: {printable((error['message'] + ' ' + error['hint']).rstrip())}\n"
    assert not out.exists()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.real_model
@pytest.mark.parametrize(
    "case", ["model", "model to describe", "layer", "prompt", "missing", "truncated", "no tensor"]
)
def test_bad_input_takes_less_than_five_seconds(case: str, tmp_path: Path) -> None:
    truncated = tmp_path / "truncated"
    States.from_tensor(torch.randn(3, 576), 1).save(truncated)
    os.truncate(truncated / TENSORS, 1000)
    argv, message = {
        "model": (["invert", "--model", "no/such-model", "--text", "x"], "'no/such-model' is no alias"),
        "model to describe": (["models", "no/such-model"], "'no/such-model' is no alias"),
        "layer": (["invert", "--text", "x", "--layer", 31], "There is no layer '31'."),
        "prompt": (["invert", "--text", "", "--layer", 15], "prompt 0 is empty text."),
        "missing": (["invert", tmp_path / "none", "--layer", 15], "is not a state bundle"),
        "truncated": (["invert", truncated, "--layer", 1], "has 1000 bytes"),
        "no tensor": (
            ["capture", "--from-tensor", tmp_path / "t.npy", "--layer", 1, "--out", tmp_path / "b"],
            "There is no file",
        ),
    }[case]
    before = sorted(tmp_path.rglob("*"))
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = process(*argv)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    # the processor's own seconds: how long one waits depends on who else uses the machine
    assert after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime < 5
    assert sorted(tmp_path.rglob("*")) == before


# --- start-up (C3) ----------------------------------------------------------------------------


def test_import_is_quick_and_does_without_torch() -> None:
    script = """
import sys, time
start = time.process_time()
import preimage
preimage.PreimageError, preimage.PromptOptions, preimage.InvertOptions
seconds = time.process_time() - start
print(seconds, *sorted({"torch", "transformers", "pyarrow", "datasets"} & sys.modules.keys()))
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert [found[1:] for found in runs] == [[], [], []]
    assert min(float(found[0]) for found in runs) < 0.3


@pytest.mark.parametrize("room", ["", ".collisions", ".geometry", ".inversion", ".models", ".theory"])
def test_dir_lists_the_public_names_without_loading_them(room: str) -> None:
    script = f"""
import sys, importlib
package = importlib.import_module("preimage{room}")
listed = dir(package)
print(sorted(set(package.__all__) - set(listed)), [n for n in listed if n in ("TYPE_CHECKING", "lazy_names")],
      "__name__" in listed, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]", "True", "False"]


def test_every_public_name_is_there() -> None:
    assert set(preimage.__all__) >= {"load", "capture", "open_states", "invert", "States", "Inversion"}
    for name in preimage.__all__:
        assert getattr(preimage, name) is not None
    with pytest.raises(AttributeError, match="module 'preimage' has no attribute 'invrt'"):
        _ = preimage.invrt


# --- the terminal (W7) ------------------------------------------------------------------------

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_what_is_printed_cannot_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(char) in HIDDEN for char in shown)
    shown.encode("utf-8")  # no lone surrogates
    assert printable(shown) == shown
    visible = [char for char in text if unicodedata.category(char) not in HIDDEN]
    if len(visible) == len(text):
        assert shown == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\r\tc\x00\x7f\x9b", r"a\nb\r\tc\x00\x7f\x9b"),
        ("\u202eevil\u2066\u200b\ufeff", r"\u202eevil\u2066\u200b\ufeff"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800", r"\ud800"),
        ("naïve 日本 🙂", "naïve 日本 🙂"),
        ("[bold]no markup[/bold]", "[bold]no markup[/bold]"),
    ],
)
def test_escapes(raw: str, shown: str) -> None:
    assert printable(raw) == shown


def test_recovered_text_is_escaped_in_the_table_and_whole_in_the_document(
    run: Typed, document: Any, model: str
) -> None:
    text = "\x1b]0;x\x07\u202e[b]\r\n"
    given = ["invert", "--model", model, "--text", text, "--layer", 1, "--method", "brute-force"]
    code, out, _ = run(*given)
    assert code == 0
    assert r"<s>\x1b]0;x\x07\u202e[b]\r\n" in out
    assert not any(unicodedata.category(char) in HIDDEN for char in out.replace("\n", ""))
    code, found = document(*given)
    assert code == 0
    assert found["results"][0]["text"] == "<s>" + text


def test_names_in_errors_are_escaped(run: Typed) -> None:
    code, _, err = run("models", "no\x1b[2Jsuch\nmodel")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "\x1b" not in err
    code, _, err = run("invert", "no\x1b[2Jsuch\nbundle")
    assert code == 2
    assert r"no\x1b[2Jsuch\nbundle is not a state bundle" in err
    assert len(err.splitlines()) == 1


def test_a_terminal_without_the_characters_gets_escapes(folders: dict[str, Path], tmp_path: Path) -> None:
    named = shutil.copytree(folders["model"], tmp_path / "modèle")
    done = process("models", "--fetch", named, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/mod\\xe8le is ready in {tmp_path}/mod\\xe8le\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full: a full stdout is not tested")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "argv", [["--help"], ["models"], ["models", "--json"], ["models", "no/such", "--json"]], ids=" ".join
)
def test_a_stdout_that_cannot_be_written_is_one_line(argv: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "preimage", *argv]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("preimage: stdout cannot be written: No space left on device.")
    assert len(done.stderr.splitlines()) == 1
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (closed.returncode, len(closed.stderr.splitlines())) == (2, 1)
    reader, writer = os.pipe()
    os.close(reader)  # whoever read has gone, as `head` does
    gone = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, "")


# --- run folders ------------------------------------------------------------------------------


def lines_of(folder: Path) -> list[bytes]:
    items = folder / "items.jsonl"
    return items.read_bytes().splitlines(keepends=True) if items.exists() else []


def test_a_finished_run_is_not_run_again(document: Any, model: str, tmp_path: Path) -> None:
    given = ["invert", "--model", model, "--text", "the cat", "--layer", 1, "--out", tmp_path / "r"]
    code, first = document(*given)
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "items.jsonl",
        "record.jsonl",
        "run.json",
    ]
    saved = json.loads((tmp_path / "r" / "run.json").read_text())
    assert (saved["schema"], saved["command"], saved["state"]) == ("preimage/1", "invert", "done")
    assert saved["model"] == first["model"]
    results = [{k: v for k, v in r.items() if k not in ("index", "exact")} for r in first["results"]]
    assert saved["results"] == results
    before = lines_of(tmp_path / "r")
    code, second = document(*given)
    assert code == 0
    assert second == first  # the seconds too: nothing was measured anew
    assert lines_of(tmp_path / "r") == before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--method", "brute-force"], 'options: method "fast", now "brute-force".'),
        (["--seed", 1], "options: seed 0, now 1."),
        (["--text", "another cat"], "states: "),
        (["--layer", 2], "layer: 1, now 2."),
        (["--dtype", "float64"], 'model: dtype "float32", now "float64".'),
        (["--model", "other"], "model: name "),
    ],
    ids=str,
)
def test_a_run_folder_of_other_work_is_refused_by_the_field(
    changed: list[object], said: str, run: Typed, model: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "r"
    first = ["invert", "--model", model, "--text", "the cat", "--layer", 1, "--out", out]
    assert run(*first)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    changed = [str(folders["other"]) if argument == "other" else argument for argument in changed]
    code, stdout, stderr = run(*first, *changed)
    assert (code, stdout) == (2, "")
    assert f"{out} was begun with another {said}" in stderr
    assert "Rerun the first command, or give another folder." in stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("kind", ["a bundle", "a file", "other files"])
def test_a_folder_that_is_no_run_folder_is_refused(
    kind: str, run: Typed, model: str, bundle: Path, tmp_path: Path
) -> None:
    out = {"a bundle": bundle, "a file": tmp_path / "f", "other files": tmp_path / "d"}[kind]
    (tmp_path / "f").write_text("mine")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code, _, stderr = run("invert", "--model", model, "--text", "the cat", "--layer", 1, "--out", out)
    assert code == 2
    assert f"{out} exists and is no run folder." in stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_half_a_line_is_dropped_and_done_again(tmp_path: Path) -> None:
    plan = {"command": "invert", "layer": 3}
    folder = Run(plan, tmp_path / "r")
    folder.keep("0", {"text": "a\u2028b\ud800", "value": float("nan")})
    folder.keep("1", {"value": 2})
    whole = lines_of(tmp_path / "r")
    with (tmp_path / "r" / "items.jsonl").open("ab") as file:
        file.write(b'{"key": "2", "item": {"val')  # killed here
    again = Run(plan, tmp_path / "r")
    assert again.items == {"0": {"text": "a\u2028b\ud800", "value": None}, "1": {"value": 2}}
    assert lines_of(tmp_path / "r") == whole
    again.keep("2", {"value": 3})
    assert Run(plan, tmp_path / "r").items["2"] == {"value": 3}


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:  # J3
    code = (
        "import sys, time; from preimage.storage import Run; "
        "kept = Run({'layer': 3}, sys.argv[1]); print('in', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "r")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            before = (tmp_path / "r" / "run.json").read_bytes()
            for plan in ({"layer": 3}, {"layer": 4}):
                with pytest.raises(RunFolderError, match="Another process"):
                    Run(plan, tmp_path / "r")
            assert (tmp_path / "r" / "run.json").read_bytes() == before
        finally:
            other.kill()
    first = Run({"layer": 3}, tmp_path / "r")  # the lock went with the process
    again = Run({"layer": 3}, tmp_path / "r")  # and does not keep out its own
    first.keep("1", {})
    assert set(Run({"layer": 3}, tmp_path / "r").items) == {"1"}
    del first, again


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("run.json", b"{"), ("run.json", b"[]"), ("run.json", b"\xff"), ("run.json", b""),
        ("items.jsonl", b"{\n"), ("items.jsonl", b"[]\n"), ("items.jsonl", b"{}\n"), ("items.jsonl", b"3\n"),
        ("items.jsonl", b"\xff\n"),
    ],
)  # fmt: skip
def test_a_damaged_run_folder_is_refused_by_the_file(name: str, raw: bytes, tmp_path: Path) -> None:
    Run({"layer": 3}, tmp_path / "r")
    (tmp_path / "r" / name).write_bytes(raw)
    with pytest.raises(RunFolderError, match=re.escape(str(tmp_path / "r" / name))) as caught:
        Run({"layer": 3}, tmp_path / "r")
    assert caught.value.hint == "Give another folder."


def test_a_schema_of_another_version_is_refused(tmp_path: Path) -> None:
    Run({"layer": 3}, tmp_path / "r")
    path = tmp_path / "r" / "run.json"
    path.write_text(path.read_text().replace("preimage/1", "preimage/0"))
    with pytest.raises(RunFolderError, match='begun with another schema: "preimage/0", now "preimage/1"'):
        Run({"layer": 3}, tmp_path / "r")


def test_a_run_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        Run({}, tmp_path / "file" / "r")
    folder = Run({}, tmp_path / "r")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"items\.jsonl cannot be written: No space left on device"):
        folder.keep("0", {})
    with pytest.raises(RunFolderError, match=r"run\.json cannot be written: No space left on device"):
        folder.finish(dict)
    monkeypatch.undo()
    assert json.loads((tmp_path / "r" / "run.json").read_text())["state"] == "running"
    assert not list((tmp_path / "r").glob("*.partial"))


def test_documents_hold_only_what_json_knows() -> None:
    text = dumps({"a": float("nan"), "b": (1, float("inf")), 3: "\ud800\x1b\u2028"})
    assert text.isascii()
    assert json.loads(text) == {"a": None, "b": [1, None], "3": "\ud800\x1b\u2028"}


# --- Ctrl-C and several processes -------------------------------------------------------------


# The command as it is, but for one method that, called so often, says so and then waits to be interrupted:
# neither a slow machine nor a quick one changes where Ctrl-C finds it.
WAITING = """
import importlib, sys, time
home, kind, method, times = sys.argv[1:5]
owner = getattr(importlib.import_module(home), kind)
work, calls = getattr(owner, method), 0

def then_wait(*given):
    global calls
    work(*given)
    calls += 1
    if calls == int(times):
        print("now", file=sys.stderr, flush=True)
        time.sleep(3600)

setattr(owner, method, then_wait)
from preimage.cli import entry
sys.argv[1:] = sys.argv[5:]
entry()
"""


def interrupted(home: str, kind: str, method: str, times: int, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets Ctrl-C after so many calls of a method."""
    command = [*PYTHON, "-c", WAITING, home, kind, method, str(times), *map(str, argv)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            said = child.stderr.readline()
            assert said == "now\n", said + child.stderr.read()
            child.send_signal(signal.SIGINT)
            stdout, stderr = child.communicate()
        finally:
            child.kill()
    return child.returncode, stdout, stderr


def test_ctrl_c_leaves_a_run_that_continues(document: Any, model: str, tmp_path: Path) -> None:  # C2
    out, count = tmp_path / "r", 4
    given = ["invert", "--model", model, "--prompts", "random", "--count", count, "--length", 4]
    given += ["--layer", 3, "--method", "brute-force"]
    code, stdout, stderr = interrupted("preimage.storage", "Run", "keep", 2, *given, "--out", out, "--json")
    assert code == 130
    assert json.loads(stdout)["error"]["code"] == "interrupted"
    assert "Traceback" not in stderr
    kept = lines_of(out)
    assert len(kept) == 2
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    code, continued = document(*given, "--out", out)
    assert code == 0
    assert lines_of(out)[: len(kept)] == kept  # the seconds in them too: finished prompts were not redone
    assert len(lines_of(out)) == count
    code, whole = document(*given)
    assert code == 0
    for result, expected in zip(continued["results"], whole["results"], strict=True):
        measured = {name: expected[name] for name in ("seconds", "setup_seconds")}
        assert result | measured == expected
    for index, line in enumerate(kept):
        assert json.loads(line)["item"]["seconds"] == continued["results"][index]["seconds"]
    assert json.loads((out / "run.json").read_text())["state"] == "done"


def test_ctrl_c_leaves_a_capture_that_continues(document: Any, model: str, tmp_path: Path) -> None:  # C2
    out, count = tmp_path / "b", 40
    given = ["capture", "--model", model, "--prompts", "random", "--count", count, "--length", 64]
    given += ["--layers", "all"]
    partial, writes = out / f"{TENSORS}.partial", 17 * (LAYERS + 2)  # one a prompt and layer
    code, stdout, stderr = interrupted(
        "preimage.states.tensor_file", "TensorFileWriter", "write", writes, *given, "--out", out
    )
    assert code == 130
    assert stdout == ""
    assert stderr.startswith("preimage: Interrupted.")
    assert not (out / MANIFEST).exists()
    done = json.loads((out / "capture.json").read_text())["done"]
    assert done in (16, 17)  # in the midst of the 17th
    before = partial.read_bytes()
    code, found = document(*given, "--out", out)
    assert code == 0
    assert found["prompts"] == count
    states, checked = preimage.open_states(out), range(max(0, done - 3), min(count, done + 3))
    expected = preimage.capture(preimage.load(model), [states.token_ids[i] for i in checked], "all")
    for index, prompt in enumerate(checked):  # where the two halves meet
        assert torch.equal(states.at(prompt, LAYERS), expected.at(index, LAYERS))
    row = 64 * WIDTH * 4
    kept = (out / TENSORS).read_bytes()
    start = len(kept) - row * count * (LAYERS + 2)
    assert kept[start : start + done * row] == before[start : start + done * row]


def test_a_bundle_is_inverted_by_a_process_that_sees_nothing_else(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    texts = ["the cat sat", "hunter2 is it"]
    for side in ("sender", "receiver"):
        (tmp_path / side).mkdir()
        shutil.copytree(folders["model"], tmp_path / side / "model")
    given = [argument for text in texts for argument in ("--text", text)]
    given += ["--model", "model", "--layers", "2", "--withhold-ids", "--out", "b"]
    sender = {"cwd": tmp_path / "sender", "PREIMAGE_CACHE": str(tmp_path / "sender" / "cache")}
    done = process(
        "capture", "--model", "model", *given, "--layers", 2, "--withhold-ids", "--out", "b", **sender
    )
    assert done.returncode == 0, done.stderr
    bundle = shutil.move(tmp_path / "sender" / "b", tmp_path / "receiver" / "b")
    shutil.rmtree(tmp_path / "sender")
    ids = [preimage.load(folders["model"]).tokenizer(text)["input_ids"] for text in texts]
    holds_no_ids(bundle, ids, texts)
    receiver = {"cwd": tmp_path / "receiver", "PREIMAGE_CACHE": str(tmp_path / "receiver" / "cache")}
    done = process("invert", "b", "--method", "brute-force", "--json", **receiver)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["status"] for result in results] == ["recovered", "recovered"]
    assert [result["token_ids"] for result in results] == ids
    assert [result["text"] for result in results] == [f"<s>{text}" for text in texts]
    assert [result["exact"] for result in results] == [None, None]  # nobody there knows the truth


def holds_no_ids(bundle: Path, ids: list[list[int]], texts: list[str]) -> None:
    assert sorted(path.name for path in bundle.iterdir()) == [MANIFEST, TENSORS]
    manifest = json.loads((bundle / MANIFEST).read_text())
    assert manifest["token_ids"] is None
    raw = (bundle / TENSORS).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert "__metadata__" not in header

    def lists_in(value: Any) -> Iterator[list[Any]]:
        if isinstance(value, list):
            yield value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from lists_in(item)

    for found in (*lists_in(manifest), *lists_in(header)):
        assert len(found) < min(map(len, ids))  # groups, layers, shapes: none is as long as a prompt
    everything = (bundle / MANIFEST).read_bytes() + raw
    for row, text in zip(ids, texts, strict=True):
        assert text.encode() not in everything
        for kind in ("<i4", "<i8", "<u2"):
            assert np.array(row, dtype=kind).tobytes() not in everything


def test_positions_of_an_object_in_memory_serve_the_command_line(
    document: Any, model: str, tmp_path: Path
) -> None:
    module = build("llama", vocab_size=VOCABULARY)
    ids = random_ids(6, vocabulary=VOCABULARY)
    preimage.capture(preimage.load(module), [ids], 3).save(tmp_path / "b")
    code, found = document("invert", tmp_path / "b", "--model", model)  # the same weights, from a folder
    assert code == 0
    assert found["results"][0]["token_ids"] == ids
    code, found = document("invert", tmp_path / "b")  # its name is no place
    assert code == 2
    assert "'LlamaForCausalLM' is no alias" in found["error"]["message"]
