"""Folders that bundles are written to: taken, impossible, or on a disk that is full."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import preimage
from preimage.errors import BundleError
from preimage.states import batches
from support.bundles import LAYERS, MANIFEST, PROMPTS, TENSORS, same_numbers, sha
from support.refusing import refused
from support.tiny import tiny

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
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 1)
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
