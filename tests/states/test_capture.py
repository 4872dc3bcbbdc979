"""Streaming capture: the bundle that saving would write, interrupted and continued."""

from __future__ import annotations

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import preimage
from preimage.errors import BundleError, LayerError, OptionError, PromptError, RunFolderError
from preimage.states import batches
from preimage.states import bundle as bundle_module
from preimage.storage import Run
from support.bundles import (
    LAYERS,
    LENGTHS,
    MANIFEST,
    PROMPTS,
    RECORD,
    TENSORS,
    capture_module,
    manifest_of,
    same_numbers,
    sha,
)
from support.refusing import refused
from support.tiny import VOCABULARY, random_ids, tiny


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
    assert sorted(path.name for path in (tmp_path / "streamed").iterdir()) == [MANIFEST, RECORD, TENSORS]


@pytest.mark.parametrize("kept_tokens", [1, 7])
@pytest.mark.parametrize("batch_tokens", [None, 10])
def test_an_interrupted_capture_is_continued(
    batch_tokens: int | None, kept_tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(batches, "_KEPT_TOKENS", kept_tokens)
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
    repeated = model.forward_tokens - before - sum(in_order[stopped_at:])
    assert repeated == 0 if kept_tokens == 1 else 0 <= repeated < kept_tokens + max(in_order[:stopped_at])
    assert seen[-1] == len(PROMPTS)
    assert sha(out / TENSORS) == sha(tmp_path / "whole" / TENSORS)
    assert manifest_of(out) == manifest_of(tmp_path / "whole")
    assert sorted(path.name for path in out.iterdir()) == [MANIFEST, RECORD, TENSORS]
    assert len((out / RECORD).read_text().splitlines()) == 2  # begun, and continued
    same_numbers(states, preimage.open_states(tmp_path / "whole"))


def test_a_capture_killed_at_any_moment_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # What a kill -9 leaves is what is on the disk at that moment: a copy of the folder.
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 1)
    model, out, copies = tiny("llama"), tmp_path / "whole", []

    def copy_folder(*_: object) -> None:
        copies.append(tmp_path / f"killed-{len(copies)}")
        shutil.copytree(out, copies[-1])

    def watch(place: Any, name: str) -> None:
        original = getattr(place, name)

        def call(*args: Any, **named: Any) -> None:
            copy_folder()
            original(*args, **named)
            copy_folder()

        monkeypatch.setattr(place, name, call)

    watch(Run, "keep")
    watch(Run, "forget")
    watch(capture_module, "finish_bundle")
    watch(bundle_module, "write_json")
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
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 1)

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
    before = {path: sha(path) for path in out.rglob("*") if path.is_file()}
    given: dict[str, Any] = {"model": tiny("llama"), "prompts": PROMPTS, "layers": LAYERS}
    given |= {name: make() for name, make in change.items()}
    error = refused(RunFolderError, lambda: preimage.capture(out=out, **given))
    assert error.message.startswith(f"{out / 'capture'} was begun with another {field}")
    assert {path: sha(path) for path in out.rglob("*") if path.is_file()} == before
    preimage.capture(tiny("llama"), PROMPTS, LAYERS, out=out)  # and the first command still goes on


@pytest.mark.parametrize("text", ["{", "[]", '{"plan": 3}', "null"])
def test_a_damaged_plan_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "b"
    interrupt(out, monkeypatch)
    (out / "capture" / "run.json").write_text(text)
    error = refused(RunFolderError, lambda: preimage.capture(tiny("llama"), PROMPTS, LAYERS, out=out))
    assert re.search(r"run\.json cannot be read|was begun with another schema", error.message)


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


def test_a_finished_capture_is_not_made_again(tmp_path: Path) -> None:
    model, ids = tiny("llama"), [random_ids(4), random_ids(6, seed=1)]
    first = preimage.capture(model, ids, layers=[1], out=tmp_path / "bundle")
    before = model.forward_tokens
    again = preimage.capture(model, ids, layers=[1], out=tmp_path / "bundle")
    assert model.forward_tokens == before
    assert torch.equal(again.at(1, 1), first.at(1, 1))
    with pytest.raises(BundleError, match="already holds a bundle"):
        preimage.capture(model, ids, layers=[2], out=tmp_path / "bundle")
