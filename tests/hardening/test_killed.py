"""Killed by SIGKILL at random steps and run again, every job ends with the same bytes (J1)."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preimage.cli import main
from support.folders import make_folder
from support.jobs import JOBS, PIECES, PROMPTS, finished_pieces, keys_of, kill_at, left_by, steps_of
from support.run_folders import lines_of

# Of each kind of job, and nearly as many again of the processes that continue: more than twenty in all.
MOMENTS = {"capture": 8, "collisions": 4, "continuations": 8, "geometry": 8, "invert": 6}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_killed_at_random_steps_ends_with_the_same_bytes(
    name: str, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    job, expected = JOBS[name], left_by(undisturbed[name])
    steps = steps_of(job, tmp_path / "counted")
    assert left_by(tmp_path / "counted") == expected  # a fork of this process computes the same bits
    assert steps.opened < steps.finishing < steps.ended
    drawn = random.Random(name)
    while_working = [drawn.randint(steps.opened, steps.finishing) for _ in range(MOMENTS[name] - 3)]
    while_finishing = [drawn.randint(steps.finishing, steps.ended - 100) for _ in range(3)]
    killed, half_done = 0, 0
    moments = [{"call": moment} for moment in (*while_working, *while_finishing)] + [{"piece": 2}]
    for number, moment in enumerate(moments):
        out = tmp_path / str(number)
        killed += kill_at(job, out, **moment)  # steps vary a little: the last may come later than the end
        finished = finished_pieces(out)
        half_done += 0 < len(finished) < PIECES[name]
        again = drawn.randint(steps.opened, steps.ended)
        killed += kill_at(job, out, call=again)  # the process that continues may be done before that step
        assert_continues(finished, out)
        finished = finished_pieces(out) or finished
        job(out)
        assert_continues(finished, out)
        assert left_by(out) == expected, f"killed at {moment}, then at {again}"
    assert killed >= MOMENTS[name]
    assert half_done


@pytest.mark.parametrize("name", ["capture", "continuations", "geometry"])
def test_a_job_killed_before_any_file_it_touches_ends_with_the_same_bytes(
    name: str, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    job, expected = JOBS[name], left_by(undisturbed[name])
    moments = steps_of(job, tmp_path / "counted").written
    assert moments > 10
    for moment in range(1, moments + 1):
        out = tmp_path / str(moment)
        assert kill_at(job, out, write=moment)
        finished = finished_pieces(out)
        job(out)
        assert_continues(finished, out)
        assert left_by(out) == expected, f"killed before file {moment} of {moments}"


def test_what_was_captured_is_not_computed_again(tmp_path: Path) -> None:
    job, out, lengths = JOBS["capture"], tmp_path / "out", sorted(map(len, PROMPTS))
    for done in range(1, len(PROMPTS)):
        assert kill_at(job, out, piece=1)
        assert len(finished_pieces(out)) == done
    passed = steps_of(job, out).passed
    assert passed == lengths[-1]


def assert_continues(finished: list[bytes], out: Path) -> None:
    """What was finished stands where it stood, and no piece is there twice."""
    now = finished_pieces(out)
    whole = [line for line in finished if line.endswith(b"\n")]
    assert now[: len(whole)] == whole or not now  # a bundle keeps no list of its pieces
    keys = keys_of([line for line in now if line.endswith(b"\n")])
    assert len(set(keys)) == len(keys)


# The command itself, in a process of its own, killed from outside as soon as a piece is finished.
COMMANDS = {
    "collisions": ["--prompts", "random", "--count", 150, "--length", 12, "--layers", "all"],
    "invert": ["--prompts", "random", "--count", 6, "--length", 12, "--layer", 3, "--method", "brute-force"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_is_continued_by_the_same_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_folder(tmp_path / "model"), tmp_path / "run"
    given = [name, "--model", *map(str, (model, *COMMANDS[name])), "--json"]
    command = [sys.executable, "-m", "preimage", *given, "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        limit = time.monotonic() + 120
        while not lines_of(out) and child.poll() is None and time.monotonic() < limit:
            time.sleep(0.002)
        child.kill()
        said = child.communicate()[1]
    assert child.returncode == -signal.SIGKILL, said
    finished = lines_of(out)
    assert finished
    assert json.loads((out / "run.json").read_bytes())["state"] == "running"
    assert main([*given, "--out", str(out)]) == 0
    assert main([*given, "--out", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    assert_continues(finished, out)
    assert left_by(out) == left_by(tmp_path / "whole")
