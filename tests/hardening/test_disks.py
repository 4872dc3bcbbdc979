"""A full disk, a read-only folder, two processes in one folder: nothing is corrupt afterwards (J3)."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from preimage.errors import PreimageError, RunFolderError
from preimage.storage import Run
from support.jobs import JOBS, begin_fork, end_fork, finished_pieces, left_by, outcome
from support.refusing import refused

KIB = 1024


def refusal(work: Callable[[], object]) -> PreimageError | None:
    """Why work was refused, in one short line with what to do; None where it was done."""
    found = None
    try:
        work()
    except PreimageError as error:
        found = error
    assert found is None or (found.hint and "\n" not in str(found))
    assert found is None or "cannot be written: " in found.message
    return found


# --- full disks -------------------------------------------------------------------------------


@pytest.fixture
def largest_file() -> Iterator[Callable[[int | None], None]]:
    """Files may grow to so many bytes and no further, as on a full disk (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_goes_on_once_files_may_grow_again(
    name: str, undisturbed: dict[str, Path], largest_file: Callable[[int | None], None], tmp_path: Path
) -> None:
    ends = set()
    for size in (0, 200, 1000, 3000, 5000, 9000, 30_000, 60_000):
        out = tmp_path / str(size)
        largest_file(size)
        error = refusal(lambda out=out: JOBS[name](out))
        largest_file(None)
        assert error is not None or size > 3000
        if error is not None:
            assert "File too large" in error.message
            assert str(out) in error.message
        finished = [line for line in finished_pieces(out) if line.endswith(b"\n")]
        ends.add(len(finished))
        JOBS[name](out)
        assert left_by(out) == left_by(undisturbed[name]), size
        assert not list(out.rglob("*.partial"))
        assert finished_pieces(out)[: len(finished)] == finished or name == "capture"
    assert len(ends) > 1 or name == "capture"  # stopped at different places; that one lays out its file first


class Disk:
    """A file system of its own in memory, which can be full or read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mount("-t", "tmpfs", "-o", "size=16m", "tmpfs", path)

    def change(self, options: str) -> None:
        self._mount("-o", f"remount,{options}", self.path)

    def _mount(self, *given: object) -> None:
        subprocess.run(["mount", *map(str, given)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    try:
        made = Disk(path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("NO mount: full and read-only disks are not tested, files that cannot grow are")
    yield made
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_on_a_full_disk_goes_on_once_there_is_room(
    name: str, undisturbed: dict[str, Path], disk: Disk
) -> None:
    full = 0
    for pages in (2, 4, 6, 9, 13):
        out = disk.path / "out"
        disk.change(f"size={4 * pages}k")
        error = refusal(lambda out=out: JOBS[name](out))
        if error is not None:
            full += 1
            assert "No space left on device" in error.message
        finished = [line for line in finished_pieces(out) if line.endswith(b"\n")]
        disk.change("size=16m")
        JOBS[name](out)
        assert left_by(out) == left_by(undisturbed[name]), pages
        assert finished_pieces(out)[: len(finished)] == finished or name == "capture"
        shutil.rmtree(out)
    assert full > 1


@pytest.mark.parametrize("name", JOBS)
def test_a_job_on_a_read_only_disk_is_refused_and_changes_nothing(
    name: str, undisturbed: dict[str, Path], half_done: dict[str, Path], disk: Disk
) -> None:
    begun = shutil.copytree(half_done[name], disk.path / "begun")
    done = shutil.copytree(undisturbed[name], disk.path / "done")
    before = left_by(begun), left_by(done)
    disk.change("ro")
    for out in (disk.path / "new", begun):
        error = refusal(lambda out=out: JOBS[name](out))
        assert error is not None
        assert "Read-only file system" in error.message
        assert str(out) in error.message
    refusal(lambda: JOBS[name](done))  # or it is read as it is
    assert (left_by(begun), left_by(done)) == before
    disk.change("rw")
    for out in (begun, done):
        JOBS[name](out)
        assert left_by(out) == left_by(undisturbed[name])


# --- two processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_a_second_process_is_refused_and_the_first_goes_on(
    name: str, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def wait_half_way() -> str:
        keep, kept = Run.keep, []

        def then_wait(run: Run, *given: Any) -> None:
            keep(run, *given)
            kept.append(given)
            if len(kept) == 2:
                os.kill(os.getpid(), signal.SIGSTOP)

        Run.keep = then_wait  # type: ignore[method-assign]  # of this process alone
        JOBS[name](out)
        return "done"

    first, pipe = begin_fork(wait_half_way)
    try:
        assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
        before = left_by(out)
        error = refused(RunFolderError, lambda: JOBS[name](out))
        assert error.message.startswith("Another process is working in ")
        assert left_by(out) == before
    finally:
        os.kill(first, signal.SIGCONT)
        status, said = end_fork(first, pipe)
    assert (status, said) == (0, "done")
    assert left_by(out) == left_by(undisturbed[name])
    assert outcome(JOBS[name](out)) == outcome(JOBS[name](undisturbed[name]))


@pytest.mark.parametrize("name", JOBS)
def test_processes_that_begin_at_once_leave_one_result(
    name: str, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    def attempt() -> str:
        try:
            JOBS[name](out)
        except PreimageError as error:
            return str(error)
        return "done"

    for attempt_number in range(3):
        out = tmp_path / str(attempt_number)
        ends = [end_fork(*fork) for fork in [begin_fork(attempt) for _ in range(3)]]
        assert all(status == 0 for status, _ in ends), ends
        said = [words for _, words in ends]
        assert "done" in said
        for words in said:
            assert words == "done" or "Another process is working in " in words, words
        JOBS[name](out)
        assert left_by(out) == left_by(undisturbed[name])
