"""States on disk: bundles, streaming capture, tensors from elsewhere, and everything that damages them."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import preimage
from preimage.errors import BundleError, LayerError, OptionError, PromptError, RunFolderError, StatesError
from preimage.models import LanguageModel
from preimage.states import States, read_tensor
from support.tiny import VOCABULARY, build, random_ids, tiny

capture_module = importlib.import_module("preimage.states.capture")  # the package's own name is the function

LAYERS: list[int | str] = [0, 2, "final"]
LENGTHS = (5, 2, 5, 1, 9, 2, 17, 5)  # mixed, and not in the order of the groups
PROMPTS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
TENSORS, MANIFEST = "states.safetensors", "manifest.json"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, LanguageModel]:
    return {
        torch.float32: tiny("llama"),
        torch.bfloat16: preimage.load(build("llama", dtype=torch.bfloat16)),
    }


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "bundle"
    return preimage.capture(tiny("llama"), PROMPTS, LAYERS).save(folder)


@pytest.fixture
def bundle(saved_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_once, tmp_path / "bundle")


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def same_numbers(one: States, other: States) -> None:
    assert len(one) == len(other)
    assert one.layers == other.layers
    assert one.dtype == other.dtype
    for layer in one.layers:
        for prompt in range(len(one)):
            assert one.at(prompt, layer).dtype == one.dtype
            assert torch.equal(one.at(prompt, layer), other.at(prompt, layer))


def refused(kind: type[preimage.PreimageError], action: Callable[[], object]) -> preimage.PreimageError:
    with pytest.raises(kind) as caught:
        action()
    assert caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bundle_gives_back_the_bits_the_model_computed(
    models: dict[torch.dtype, LanguageModel], dtype: torch.dtype, positions: str, tmp_path: Path
) -> None:
    model = models[dtype]
    states = preimage.capture(model, PROMPTS, LAYERS, positions=positions)
    opened = preimage.open_states(states.save(tmp_path / "b"))
    same_numbers(opened, states)
    assert opened.layers == (0, 2, "final")
    assert opened.dtype == dtype
    assert opened.positions == positions
    assert opened.lengths == LENGTHS
    assert opened.token_ids == tuple(map(tuple, PROMPTS))
    assert opened.model == model.identity.to_dict()
    assert opened.noise_floor == states.noise_floor
    assert set(opened.noise_floor) == {0, 2, "final"}
    opened.require_made_by(model)
    last = {layer: opened.last(layer) for layer in opened.layers}
    for prompt, ids in enumerate(PROMPTS):
        for layer, direct in model.states(torch.tensor([ids]), opened.layers).items():
            kept = direct[0] if positions == "all" else direct[0, -1:]
            assert torch.equal(opened.at(prompt, layer), kept)
            assert torch.equal(last[layer][prompt], direct[0, -1])
            assert last[layer].dtype == dtype


def test_the_manifest_says_everything_but_the_numbers(bundle: Path) -> None:
    model, manifest = tiny("llama"), manifest_of(bundle)
    assert sorted(path.name for path in bundle.iterdir()) == [MANIFEST, TENSORS]
    assert manifest["schema"] == "preimage/1"
    assert manifest["kind"] == "states"
    assert manifest["model"] == model.identity.to_dict()
    assert len(manifest["model"]["weight_hash"]) == 64
    assert manifest["dtype"] == "float32"
    assert manifest["layer_convention"].startswith("0 = input of block 1; k = raw output of block k;")
    assert manifest["layers"] == LAYERS
    assert manifest["positions"] == "all"
    assert manifest["d_model"] == 32
    assert manifest["token_ids"] == PROMPTS
    assert all(0 < value < 1e-3 for value in manifest["noise_floor"].values())
    assert manifest["checksums"] == {TENSORS: sha(bundle / TENSORS)}
    assert manifest["bytes"] == (bundle / TENSORS).stat().st_size
    tensors = load_file(bundle / TENSORS)  # plain safetensors, readable without preimage
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        f"layer.{layer}.group.{number}": (rows, length, 32)
        for layer in LAYERS
        for number, (length, rows) in enumerate([(1, 1), (2, 2), (5, 3), (9, 1), (17, 1)])
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_withheld_ids_are_nowhere_in_the_bundle(streamed: bool, tmp_path: Path) -> None:
    model, folder = tiny("llama"), tmp_path / "b"
    if streamed:
        preimage.capture(model, PROMPTS, LAYERS, out=folder, withhold_ids=True)
    else:
        preimage.capture(model, PROMPTS, LAYERS).save(folder, withhold_ids=True)
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, TENSORS]
    assert manifest_of(folder)["token_ids"] is None
    opened = preimage.open_states(folder)
    assert opened.token_ids is None
    assert opened.lengths == LENGTHS
    same_numbers(opened, preimage.capture(model, PROMPTS, LAYERS))


def test_one_list_of_ids_and_one_layer(tmp_path: Path) -> None:
    states = preimage.capture(tiny("gpt2"), random_ids(4), 1, out=tmp_path / "b")
    assert (len(states), states.layers, states.lengths) == (1, (1,), (4,))


def test_wrong_questions_name_what_there_is(bundle: Path) -> None:
    states = preimage.open_states(bundle)
    error = refused(LayerError, lambda: states.at(0, 1))
    assert error.message == "Layer 1 was not captured."
    assert error.hint == "These states hold layer 0, 2, final."
    refused(LayerError, lambda: states.last(3))
    error = refused(StatesError, lambda: states.at(8, 0))
    assert str(error) == "There is no prompt 8. These states hold prompts 0..7."


def test_wrong_captures_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    model, out = tiny("llama"), tmp_path / "b"
    refused(OptionError, lambda: preimage.capture(model, PROMPTS, out=out, batch_tokens=0))
    refused(LayerError, lambda: preimage.capture(model, PROMPTS, 4, out=out))
    refused(PromptError, lambda: preimage.capture(model, [], out=out))
    error = refused(PromptError, lambda: preimage.capture(model, [[1], [VOCABULARY]], out=out))
    assert f"Prompt 1 has token id {VOCABULARY}" in error.message
    error = refused(PromptError, lambda: preimage.capture(model, [[1] * 129], out=out))
    assert "129 tokens; this model takes at most 128" in error.message
    refused(PromptError, lambda: preimage.capture(model, [[]], out=out))
    assert list(tmp_path.iterdir()) == []


# --- streaming --------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "last"])
def test_streaming_writes_the_very_bundle_that_saving_would(positions: str, tmp_path: Path) -> None:
    model = tiny("llama")
    streamed = preimage.capture(model, PROMPTS, LAYERS, positions=positions, out=tmp_path / "streamed")
    memory = preimage.capture(model, PROMPTS, LAYERS, positions=positions)
    memory.save(tmp_path / "saved")
    same_numbers(streamed, memory)
    same_numbers(preimage.open_states(tmp_path / "streamed"), memory)
    assert sha(tmp_path / "streamed" / TENSORS) == sha(tmp_path / "saved" / TENSORS)
    assert manifest_of(tmp_path / "streamed") == manifest_of(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "streamed").iterdir()) == [MANIFEST, TENSORS]


@pytest.mark.parametrize("seconds_between_syncs", [0.0, 1e9])
@pytest.mark.parametrize("batch_tokens", [None, 10])
def test_an_interrupted_capture_is_continued(
    batch_tokens: int | None, seconds_between_syncs: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture_module, "_SYNC_SECONDS", seconds_between_syncs)
    model = tiny("llama")
    options: dict[str, Any] = {"layers": LAYERS, "batch_tokens": batch_tokens}
    preimage.capture(model, PROMPTS, out=tmp_path / "whole", **options)
    stopped_at = 0

    def stop_half_way(done: int, total: int, note: str) -> None:
        nonlocal stopped_at
        if done >= total // 2:
            stopped_at = done
            raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        preimage.capture(model, PROMPTS, out=out, progress=stop_half_way, **options)
    assert not (out / MANIFEST).exists()
    error = refused(BundleError, lambda: preimage.open_states(out))
    assert "rerun the same command" in error.hint
    before, seen = model.forward_tokens, []
    states = preimage.capture(model, PROMPTS, out=out, progress=lambda *at: seen.append(at[0]), **options)
    in_order = sorted(LENGTHS)  # groups in ascending length
    assert stopped_at >= 4
    assert model.forward_tokens - before == sum(in_order[stopped_at:])
    assert seen[0] > stopped_at
    assert seen[-1] == len(PROMPTS)
    assert sha(out / TENSORS) == sha(tmp_path / "whole" / TENSORS)
    assert manifest_of(out) == manifest_of(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir()) == [MANIFEST, TENSORS]
    same_numbers(states, preimage.open_states(tmp_path / "whole"))


def test_a_capture_killed_at_any_moment_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What a kill -9 leaves is what is on the disk at that moment: a copy of the folder.
    monkeypatch.setattr(capture_module, "_SYNC_SECONDS", 0.0)
    model, out, copies = tiny("llama"), tmp_path / "whole", []

    def copy_folder(*_: object) -> None:
        copies.append(tmp_path / f"killed-{len(copies)}")
        shutil.copytree(out, copies[-1])

    write_plan, finish = capture_module._write_plan, capture_module.finish_bundle

    def watched(original: Callable[..., None]) -> Callable[..., None]:
        def call(folder: Path, *args: Any) -> None:
            if folder == out and folder.exists():
                copy_folder()
            original(folder, *args)
            if folder == out:
                copy_folder()

        return call

    monkeypatch.setattr(capture_module, "_write_plan", watched(write_plan))
    monkeypatch.setattr(capture_module, "finish_bundle", watched(finish))
    preimage.capture(model, PROMPTS, LAYERS, out=out, progress=copy_folder)
    monkeypatch.undo()
    assert len(copies) > 20
    expected, unfinished = sha(out / TENSORS), 0
    for folder in copies:
        if not (folder / MANIFEST).exists():
            preimage.capture(model, PROMPTS, LAYERS, out=folder)
            unfinished += 1
        assert sha(folder / TENSORS) == expected
        assert manifest_of(folder)["checksums"] == {TENSORS: expected}
    assert unfinished > 20


@pytest.mark.parametrize("damage", ["missing", "truncated", "renamed"])
def test_a_capture_whose_partial_file_was_lost_starts_again(
    damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, out = tiny("llama"), tmp_path / "b"
    interrupt(out, monkeypatch)
    partial = out / f"{TENSORS}.partial"
    if damage == "missing":
        partial.unlink()
    elif damage == "truncated":
        os.truncate(partial, partial.stat().st_size // 2)
    else:  # killed after the tensor file had its name and before the manifest was there
        partial.rename(out / TENSORS)
    preimage.capture(model, PROMPTS, LAYERS, out=out)
    same_numbers(preimage.open_states(out), preimage.capture(model, PROMPTS, LAYERS))


def interrupt(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "_SYNC_SECONDS", 0.0)

    def stop(done: int, total: int, note: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preimage.capture(tiny("llama"), PROMPTS, LAYERS, out=out, progress=stop)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": lambda: tiny("llama", seed=1)}),
        ("prompts", {"prompts": lambda: [*PROMPTS[:-1], random_ids(5, 99)]}),
        ("prompts", {"prompts": lambda: PROMPTS[:-1]}),
        ('layers: [0, 2, "final"], now [0, 1, "final"]', {"layers": lambda: [0, 1, "final"]}),
        ('positions: "all", now "last"', {"positions": lambda: "last"}),
    ],
)
def test_other_work_in_the_folder_of_an_interrupted_capture_is_refused(
    field: str, change: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "b"
    interrupt(out, monkeypatch)
    before = {path.name: sha(path) for path in out.iterdir()}
    given: dict[str, Any] = {"model": tiny("llama"), "prompts": PROMPTS, "layers": LAYERS}
    given |= {name: make() for name, make in change.items()}
    error = refused(RunFolderError, lambda: preimage.capture(out=out, **given))
    assert error.message.startswith(f"{out} was begun with another {field}")
    assert {path.name: sha(path) for path in out.iterdir()} == before
    preimage.capture(tiny("llama"), PROMPTS, LAYERS, out=out)  # and the first command still goes on


@pytest.mark.parametrize("text", ["{", "[]", '{"plan": 3}', '{"done": 1}', "null", '{"plan": {}, "done": 0}'])
def test_a_damaged_plan_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "b"
    interrupt(out, monkeypatch)
    (out / "capture.json").write_text(text)
    error = refused(RunFolderError, lambda: preimage.capture(tiny("llama"), PROMPTS, LAYERS, out=out))
    assert "capture.json cannot be read" in error.message


def test_large_captures_live_in_a_folder_that_goes_with_the_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny("llama")
    expected = preimage.capture(model, PROMPTS, LAYERS)
    numbers = sum(LENGTHS) * len(LAYERS) * 32
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(capture_module, "_MEMORY_BYTES", 4 * numbers)
    preimage.capture(model, PROMPTS, LAYERS)
    assert list(tmp_path.iterdir()) == []  # it just fits
    monkeypatch.setattr(capture_module, "_MEMORY_BYTES", 4 * numbers - 1)
    states = preimage.capture(model, PROMPTS, LAYERS)
    assert len(list(tmp_path.iterdir())) == 1
    same_numbers(states, expected)
    del states
    gc.collect()
    assert list(tmp_path.iterdir()) == []

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preimage.capture(model, PROMPTS, LAYERS, progress=stop)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


# --- targets ----------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda out: preimage.capture(tiny("llama"), PROMPTS, LAYERS).save(out),
    "stream": lambda out: preimage.capture(tiny("llama"), PROMPTS, LAYERS, out=out),
}


# the same capture again would simply be done
OTHER_WORK = WRITERS | {"stream": lambda out: preimage.capture(tiny("llama"), PROMPTS[::-1], LAYERS, out=out)}


@pytest.mark.parametrize("write", OTHER_WORK.values(), ids=OTHER_WORK)
def test_a_target_that_is_taken_is_refused_and_left_alone(
    write: Callable[[Path], object], bundle: Path, tmp_path: Path
) -> None:
    before = {path.name: sha(path) for path in bundle.iterdir()}
    error = refused(BundleError, lambda: write(bundle))
    assert str(error) == f"{bundle} already holds a bundle. Give another folder."
    assert {path.name: sha(path) for path in bundle.iterdir()} == before
    file = tmp_path / "file"
    file.write_text("mine")
    error = refused(BundleError, lambda: write(file))
    assert error.message == f"{file} is a file."
    assert file.read_text() == "mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    error = refused(BundleError, lambda: write(other))
    assert error.message == f"{other} holds other files, thesis.tex first."
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_target_that_cannot_be_made_is_refused(write: Callable[[Path], object], bundle: Path) -> None:
    error = refused(BundleError, lambda: write(bundle / TENSORS / "below a file"))
    assert "cannot be written: Not a directory" in error.message
    error = refused(BundleError, lambda: write(Path("/proc/preimage-test/b")))
    assert "cannot be written" in error.message


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    """Files may grow to so many bytes and no further, as on a full disk (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size or soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_leaves_no_bundle_behind(
    write: Callable[[Path], object], small_disk: Callable[[int], None], tmp_path: Path
) -> None:
    write(tmp_path / "warm-up")  # so that nothing but the bundle is written below
    out = tmp_path / "b"
    small_disk(4096)
    error = refused(BundleError, lambda: write(out))
    small_disk(0)  # as large as it was
    assert "cannot be written: File too large" in error.message
    assert not (out / MANIFEST).exists()
    assert not (out / TENSORS).exists()
    write(out)  # once there is room
    same_numbers(preimage.open_states(out), preimage.capture(tiny("llama"), PROMPTS, LAYERS))


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_disk_that_fills_up_on_the_way_leaves_no_bundle_behind(
    write: Callable[[Path], object], after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture_module, "_SYNC_SECONDS", 0.0)
    write(tmp_path / "warm-up")
    out, calls, fsync = tmp_path / "b", 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    if write is WRITERS["save"] and after == 3:
        write(out)  # saving syncs but twice: tensors and manifest
        assert calls == 2
    else:
        error = refused(BundleError, lambda: write(out))
        assert error.message == f"{out} cannot be written: No space left on device."
        assert not (out / MANIFEST).exists()
        monkeypatch.setattr(os, "fsync", fsync)
        write(out)
    same_numbers(preimage.open_states(out), preimage.capture(tiny("llama"), PROMPTS, LAYERS))


# --- damage -----------------------------------------------------------------------------------


def test_no_bundle_and_no_folder(tmp_path: Path) -> None:
    error = refused(BundleError, lambda: preimage.open_states(tmp_path / "none"))
    assert error.message == f"{tmp_path / 'none'} is not a state bundle: no manifest.json in it."
    assert "preimage capture --out" in error.hint
    refused(BundleError, lambda: preimage.open_states(tmp_path))


def test_a_missing_tensor_file_is_named(bundle: Path) -> None:
    (bundle / TENSORS).unlink()
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert f"{bundle / TENSORS} is missing" in error.message


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_tensor_file_is_named(left: int, verify: bool, bundle: Path) -> None:
    whole = (bundle / TENSORS).stat().st_size
    os.truncate(bundle / TENSORS, left % whole)
    error = refused(BundleError, lambda: preimage.open_states(bundle, verify=verify))
    assert f"{bundle / TENSORS} has {left % whole} bytes, {whole} were written" in error.message


@pytest.mark.parametrize("where", [9, 0.5, -1])
def test_one_flipped_bit_fails_the_checksum_by_name(where: float, bundle: Path) -> None:
    path = bundle / TENSORS
    data = bytearray(path.read_bytes())
    data[int(where * len(data)) if isinstance(where, float) else where] ^= 1
    path.write_bytes(data)
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert error.message == f"{path} fails its checksum."


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"3", b'"schema"', b"\xff\xfe", b"[" * 100_000, b'{"schema": "preimage/1"}'],
    ids=["empty", "open", "list", "null", "number", "text", "bytes", "deep", "bare"],
)
def test_a_manifest_that_is_none_is_refused(raw: bytes, bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(raw)
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert f"{bundle / MANIFEST} cannot be used" in error.message


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema": lambda m: m.update(schema="preimage/2"),
    "no schema": lambda m: m.pop("schema"),
    "no bytes": lambda m: m.pop("bytes"),
    "no checksums": lambda m: m.pop("checksums"),
    "empty checksums": lambda m: m.update(checksums={}),
    "checksums of a kind": lambda m: m.update(checksums=[1]),
    "no model": lambda m: m.pop("model"),
    "empty model": lambda m: m.update(model={}),
    "model is text": lambda m: m.update(model="smollm2"),
    "no ids": lambda m: m.pop("token_ids"),
    "too few ids": lambda m: m["token_ids"].pop(),
    "shorter ids": lambda m: m["token_ids"][0].pop(),
    "ids are text": lambda m: m["token_ids"].__setitem__(0, "abcde"),
    "ids are no ints": lambda m: m["token_ids"].__setitem__(0, [0.5] * 5),
    "no groups": lambda m: m.pop("groups"),
    "prompt twice": lambda m: m["groups"][0].update(prompts=[0]),
    "prompt missing": lambda m: m["groups"].pop(),
    "other length": lambda m: m["groups"][0].update(length=2),
    "negative length": lambda m: m["groups"][0].update(length=-1),
    "other width": lambda m: m.update(d_model=31),
    "other layers": lambda m: m.update(layers=[0, 1, "final"]),
    "fewer layers": lambda m: m.update(layers=[0, 2]),
    "layer of a kind": lambda m: m.update(layers=["first", 2, "final"]),
    "other positions": lambda m: m.update(positions="some"),
    "last positions": lambda m: m.update(positions="last"),
    "other dtype": lambda m: m.update(dtype="float64"),
    "half of the same": lambda m: m.update(dtype="bfloat16"),
    "no dtype": lambda m: m.update(dtype="load"),
    "integer dtype": lambda m: m.update(dtype="int32"),
    "no floor": lambda m: m.pop("noise_floor"),
    "floor is text": lambda m: m["noise_floor"].update({"0": "low"}),
    "infinite floor": lambda m: m["noise_floor"].update({"0": float("inf")}),
    "floor is NaN": lambda m: m["noise_floor"].update({"0": float("nan")}),
    "negative floor": lambda m: m["noise_floor"].update({"0": -1.0}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_disagrees_is_refused(
    change: Callable[[dict[str, Any]], object], bundle: Path
) -> None:
    manifest = manifest_of(bundle)
    original = copy.deepcopy(manifest)
    change(manifest)
    assert manifest != original
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert str(bundle) in error.message
    assert "again" in error.hint


def test_the_schema_that_was_found_and_the_one_wanted_are_named(bundle: Path) -> None:
    manifest = manifest_of(bundle) | {"schema": "preimage/2"}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    error = refused(BundleError, lambda: preimage.open_states(bundle))
    assert "its schema is 'preimage/2', not 'preimage/1'" in error.message


def test_states_of_another_model_or_width_are_refused(bundle: Path) -> None:
    states, other = preimage.open_states(bundle), tiny("llama", seed=1)
    states.require_made_by(tiny("llama"))
    states.require_width(other)
    error = refused(BundleError, lambda: states.require_made_by(other))
    ours, theirs = (model.identity.weight_hash[:12] for model in (other, tiny("llama")))
    assert "were made by LlamaForCausalLM" in error.message
    assert ours in error.message
    assert theirs in error.message
    wide = preimage.load(build("gpt2", n_embd=64))
    for refuse in (states.require_width, states.require_made_by):
        error = refused(StatesError, lambda refuse=refuse: refuse(wide))
        assert "32 wide, those of GPT2LMHeadModel are 64" in error.message


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # computed positions, and a table of them
def test_more_positions_than_the_model_has_are_refused_before_any_work(architecture: str) -> None:
    model = preimage.load(build(architecture))
    refused(PromptError, lambda: preimage.capture(model, [[5] * 129]))
    long = torch.randn(2, 129, 32)
    message = f"Prompt 0 has 129 positions; {model.name} takes at most 128."
    for work in (
        lambda: preimage.invert(model, long, layer=1),
        lambda: preimage.invert(model, States.from_tensor(long, 1), method="sipit"),
        lambda: States.from_tensor(long, 1, model),
        lambda: States.from_tensor(long, 1).require_made_by(model),
    ):
        assert refused(StatesError, work).message == message
    refused(PromptError, lambda: preimage.find_collisions(model, [[5] * 129, [6] * 129]))
    assert model.forward_tokens == 0


def test_states_of_another_dtype_say_which_to_load(bundle: Path) -> None:
    half = preimage.load(build("llama", dtype=torch.bfloat16))
    error = refused(BundleError, lambda: preimage.open_states(bundle).require_made_by(half))
    assert "with dtype float32" in error.hint


# --- tensors from elsewhere -------------------------------------------------------------------


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


def npy(shape: str, descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)


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


# --- hostile safetensors (S4) -----------------------------------------------------------------


def tensor_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "half a length": b"\x01\x02\x03",
    "length alone": tensor_file(b""),
    "huge length": tensor_file({}, length=2**62),
    "largest length": tensor_file({}, length=2**64 - 1),
    "150 MB of header claimed": tensor_file({}, length=150_000_000),
    "90 MB of header claimed": tensor_file({}, length=90_000_000),
    "no json": tensor_file(b"this is not json"),
    "half a json": tensor_file(b'{"h": {"dtype": "F32", "sha'),
    "no utf-8": tensor_file(b'{"\xff\xfe": 1}'),
    "json of a kind": tensor_file([1, 2]),
    "deep json": tensor_file(b"[" * 200_000),
    "deep entry": tensor_file(b'{"h":' * 100_000),
    "overlapping": tensor_file({"a": entry(0, 8, [2, 1]), "b": entry(4, 12, [2, 1])}, bytes(12)),
    "same bytes twice": tensor_file({"a": entry(0, 8, [2, 1]), "b": entry(0, 8, [2, 1])}, bytes(8)),
    "beyond the file": tensor_file({"h": entry(0, 4096, [32, 32])}, bytes(16)),
    "far beyond the file": tensor_file({"h": entry(0, 2**62, [2**30, 2**30])}, bytes(16)),
    "hole": tensor_file({"a": entry(0, 4, [1, 1]), "b": entry(8, 12, [1, 1])}, bytes(12)),
    "left-over bytes": tensor_file({"h": entry(0, 4, [1, 1])}, bytes(400)),
    "backwards": tensor_file({"h": entry(8, 0, [2, 1])}, bytes(8)),
    "negative": tensor_file({"h": entry(-8, 0, [2, 1])}, bytes(8)),
    "shape too large": tensor_file({"h": entry(0, 8, [2**40, 2])}, bytes(8)),
    "shape overflows": tensor_file({"h": entry(0, 8, [2**62, 2**62, 4])}, bytes(8)),
    "negative shape": tensor_file({"h": entry(0, 8, [-2, -1])}, bytes(8)),
    "unknown type": tensor_file({"h": entry(0, 8, [2, 1], "Q7")}, bytes(8)),
    "name twice": tensor_file(
        b'{"h":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},'
        b'"h":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}',
        bytes(4),
    ),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_hostile_safetensors_are_refused_cleanly(raw: bytes, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(raw)
    error = refused(StatesError, lambda: read_tensor(path))
    assert f"{path} cannot be read as safetensors" in error.message
    assert len(error.message) < 1000
    exchange(bundle, raw)
    error = refused(StatesError, lambda: preimage.open_states(bundle))
    assert str(bundle / TENSORS) in error.message


def exchange(bundle: Path, raw: bytes) -> None:
    """Another tensor file, with a manifest that vouches for it."""
    (bundle / TENSORS).write_bytes(raw)
    manifest = manifest_of(bundle)
    manifest |= {"bytes": len(raw), "checksums": {TENSORS: hashlib.sha256(raw).hexdigest()}}
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def test_tensors_of_another_kind_or_name_are_refused(bundle: Path, tmp_path: Path) -> None:
    tensors = load_file(bundle / TENSORS)
    name = "layer.2.group.1"
    for changed in (
        {name: tensors[name].to(torch.float64)},
        {name: tensors[name].to(torch.int32)},
        {name: tensors[name][:, :1].contiguous()},
        {"one more": tensors[name].clone()},
    ):
        save_file(tensors | changed, tmp_path / "t.safetensors")
        exchange(bundle, (tmp_path / "t.safetensors").read_bytes())
        error = refused(BundleError, lambda: preimage.open_states(bundle))
        assert error.message == f"{bundle / TENSORS} and its manifest disagree."
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "t.safetensors")
    exchange(bundle, (tmp_path / "t.safetensors").read_bytes())
    refused(BundleError, lambda: preimage.open_states(bundle))


def test_hostile_files_take_no_memory(bundle: Path, tmp_path: Path) -> None:
    names = []
    for number, raw in enumerate(HOSTILE.values()):
        names.append(f"{number}.safetensors")
        (tmp_path / names[-1]).write_bytes(raw)
        shutil.copytree(bundle, tmp_path / f"bundle-{number}")
        exchange(tmp_path / f"bundle-{number}", raw)
        names.append(f"bundle-{number}")
    for number, shape in enumerate(["(100000000000, 4)", "(10000000, 40)"]):
        names.append(f"{number}.npy")
        (tmp_path / names[-1]).write_bytes(npy(shape))
    script = f"""
import os, resource
os.chdir({str(tmp_path)!r})
import preimage
from preimage.states import open_states, read_tensor
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
try: read_tensor("0.safetensors")
except preimage.PreimageError: pass
before = peak()
for name in {names!r}:
    try: (open_states if name.startswith("bundle") else read_tensor)(name)
    except preimage.PreimageError: continue
    raise SystemExit(name + " was accepted")
print((peak() - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40  # MiB; the files themselves are up to half a megabyte


def test_a_finished_capture_is_not_made_again(tmp_path: Path) -> None:
    model, ids = tiny("llama"), [random_ids(4), random_ids(6, seed=1)]
    first = preimage.capture(model, ids, layers=[1], out=tmp_path / "bundle")
    before = model.forward_tokens
    again = preimage.capture(model, ids, layers=[1], out=tmp_path / "bundle")
    assert model.forward_tokens == before
    assert torch.equal(again.at(1, 1), first.at(1, 1))
    with pytest.raises(BundleError, match="already holds a bundle"):
        preimage.capture(model, ids, layers=[2], out=tmp_path / "bundle")
