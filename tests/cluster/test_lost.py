"""Workers and drivers killed at any moment, pieces that kill, and work that is refused (J1, J3)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import preimage
from preimage.cluster import Cluster, engine
from preimage.cluster.schedule import ATTEMPTS, Schedule
from preimage.errors import ClusterError, OptionError, RunFolderError, StatesError
from preimage.geometry.sweeping import measure_model
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, gather
from preimage.storage import Run, working_with
from support.folders import make_folder
from support.jobs import left_by, outcome
from support.refusing import refused
from support.run_folders import lines_of

batches = __import__("preimage.states.batches", fromlist=["batches"])


def collisions(model: LanguageModel, out: Path, **more: Any) -> object:
    prompts = gather("random", model, PromptOptions(count=200, length=9))
    return preimage.find_collisions(model, prompts, hard_bases=1, closest=3, out=out, **more)


def geometry(model: LanguageModel, out: Path) -> object:
    prompts = gather("random", model, PromptOptions(count=100, length=9))
    return measure_model(model, prompts, options=preimage.GeometryOptions(subsets=2), out=out)


def inversion(model: LanguageModel, out: Path) -> object:
    prompts = gather("random", model, PromptOptions(count=24, length=9))
    with working_with(None):
        states = preimage.capture(model, prompts, 2)
    return preimage.invert(model, states, method="brute-force", out=out)


@pytest.fixture(autouse=True)
def _all_there(cluster: Cluster) -> None:
    cluster.wait()  # whatever the test before did to them


@contextmanager
def killing(cluster: Cluster, moments: list[float], killed: list[int]) -> Iterator[None]:
    """A worker is killed after each of these pauses, as long as this lasts."""
    over, drawn = threading.Event(), random.Random(3)

    def kill() -> None:
        for pause in moments:
            while not over.is_set() and not cluster.processes:
                over.wait(0.05)
            if over.wait(pause):
                return
            numbers = list(cluster.processes.values())
            if numbers:
                chosen = drawn.choice(numbers)
                with suppress(ProcessLookupError):  # it was killed before, and nobody has missed it yet
                    os.kill(chosen, signal.SIGKILL)
                    killed.append(chosen)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_workers_killed_at_ten_random_moments_change_nothing(
    model: LanguageModel, cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 90)
    killed: list[int] = []
    drawn = random.Random(1)
    work: list[Callable[[LanguageModel, Path], object]] = [collisions, inversion, geometry]
    whole = {one.__name__: outcome(one(model, runs / one.__name__)) for one in work}
    attempt = 0
    while len(killed) < 10:
        one = work[attempt % len(work)]
        out = runs / f"{one.__name__}-{attempt}"
        moments = [drawn.uniform(0.02, 1.0) for _ in range(3)]
        with working_with(cluster), killing(cluster, moments, killed):
            assert outcome(one(model, out)) == whole[one.__name__]
        assert left_by(out) == left_by(runs / one.__name__)
        attempt += 1
        assert attempt < 30
    assert cluster.lost >= 5  # some were killed between two pieces, and were missed by nobody


def test_a_piece_that_kills_its_workers_is_left_to_the_last_and_named(
    model: LanguageModel, cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[int] = []

    class Poisoned(Schedule[Any]):
        """Whoever begins with layer 2 dies of it."""

        def next(self, worker: Any) -> Any:
            piece = super().next(worker)
            if piece == ("2",):
                number = cluster.processes[worker]
                deaths.append(number)
                threading.Timer(0.0, os.kill, (number, signal.SIGKILL)).start()
                time.sleep(0.3)
            return piece

    with working_with(cluster):
        monkeypatch.setattr(engine, "Schedule", Poisoned)
        error = refused(ClusterError, lambda: collisions(model, runs / "run"))
    assert "1 of 5 pieces" in error.message
    assert "(2: " in error.message
    assert len(deaths) == ATTEMPTS
    kept = [json.loads(line)["key"] for line in lines_of(runs / "run")]
    assert sorted(kept) == ["0", "1", "3", "final"]  # all others are done
    monkeypatch.undo()
    collisions(model, runs / "whole")
    with working_with(cluster):
        collisions(model, runs / "run")
    assert left_by(runs / "run") == left_by(runs / "whole")


def test_what_a_worker_refuses_is_refused_in_its_words(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    broken = preimage.load(make_folder(tmp_path / "model"))
    broken.module.get_input_embeddings().weight.data[7] = float("nan")
    broken.module.save_pretrained(tmp_path / "broken")
    model = preimage.load(tmp_path / "broken")
    prompts = [[1, 2, 3], [4, 5, 6], [1, 9, 7]]

    def search() -> object:
        return preimage.find_collisions(model, prompts, [2, 3], hard_bases=0)

    here = refused(StatesError, search)
    with working_with(cluster):
        there = refused(StatesError, search)
    assert re.sub("layer [23]", "", str(here)) == re.sub("layer [23]", "", str(there))  # whoever was first
    assert "Prompt 2, layer" in there.message


def test_a_worker_of_another_version_is_refused(
    model: LanguageModel, cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "facts", lambda: {"torch": "0.1"})
    for number in cluster.processes.values():
        os.kill(number, signal.SIGKILL)  # who comes instead is asked
    with working_with(cluster):
        error = refused(ClusterError, lambda: inversion(model, runs / "run"))
    assert re.search(r"A worker has torch .*, not 0\.1\.", error.message)


def test_models_that_workers_cannot_load_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    model = preimage.load(make_folder(tmp_path / "model"))
    in_memory = preimage.load(model.module, tokenizer=model.tokenizer)
    with working_with(cluster):
        error = refused(OptionError, lambda: preimage.capture(in_memory, [[1, 2], [3]]))
        assert "in the memory of this process alone" in error.message
        with model.module.get_input_embeddings().register_forward_hook(lambda *given: None):
            error = refused(OptionError, lambda: preimage.capture(model, [[1, 2], [3]]))
            assert "has hooks" in error.message


def test_weights_that_changed_on_the_disk_are_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 1)
    model = preimage.load(make_folder(tmp_path / "model"))
    make_folder(tmp_path / "model", seed=1)
    with working_with(cluster):
        error = refused(preimage.errors.ModelError, lambda: preimage.capture(model, [[1, 2], [3]]))
    assert "has other weights on a worker" in error.message


# --- drivers ----------------------------------------------------------------------------------


def command(model: Path, out: Path, *more: str) -> list[str]:
    given = ["invert", "--model", str(model), "--prompts", "random", "--count", "60", "--length", "16"]
    given += ["--layer", "2", "--method", "brute-force", "--out", str(out), "--json"]
    return [sys.executable, "-m", "preimage", *given, *more]


CLUSTER = ("--cluster", "local", "--workers", "2")


def test_a_killed_driver_is_continued_and_nothing_is_left_of_its_cluster(tmp_path: Path) -> None:
    model, out = make_folder(tmp_path / "model"), tmp_path / "run"
    with subprocess.Popen(command(model, out, *CLUSTER), stdout=subprocess.DEVNULL) as driver:
        limit = time.monotonic() + 120
        while len(lines_of(out)) < 2 and driver.poll() is None and time.monotonic() < limit:
            time.sleep(0.005)
        driver.send_signal(signal.SIGSTOP)  # so that it has not finished when it is killed
        # a second driver is refused as long as the first is there
        second = subprocess.run(command(model, out), capture_output=True, text=True, check=False)
        finished, started = lines_of(out), processes_of(driver.pid)
        driver.kill()
    assert started
    assert second.returncode == 2
    assert "Another process is working in" in json.loads(second.stdout)["error"]["message"]
    assert len(finished) >= 2
    wait_until_gone(driver.pid)
    again = subprocess.run(command(model, out, *CLUSTER), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    whole = subprocess.run(command(model, tmp_path / "whole"), capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stderr
    assert left_by(out) == left_by(tmp_path / "whole")
    keys = [json.loads(line)["key"] for line in lines_of(out)]
    assert keys == [str(number) for number in range(60)]  # in order, each once
    then = {line.split(b'"key": ')[1].split(b",")[0]: line for line in lines_of(out)}
    for line in finished:  # with the times they were measured with: they were not done again
        assert then[line.split(b'"key": ')[1].split(b",")[0]] == line


def processes_of(driver: int) -> list[str]:
    """Ray's processes that a driver started, by their commands: a session is named for its driver."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_text() if place.name.isdecimal() else ""
        except OSError:
            continue
        if re.search(rf"session_[\d_-]+_{driver}\b", words):
            found.append(words[:80])
    return found


def wait_until_gone(driver: int) -> None:
    limit = time.monotonic() + 60
    while processes_of(driver) and time.monotonic() < limit:
        time.sleep(0.2)
    assert not processes_of(driver)


def test_two_runs_in_one_folder_do_not_meet(model: LanguageModel, cluster: Cluster, runs: Path) -> None:
    code = (
        "import sys, time; from preimage.storage import Run; "
        "kept = Run({'layer': 3}, sys.argv[1]); print('in', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(runs / "run")], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            with working_with(cluster):
                error = refused(RunFolderError, lambda: collisions(model, runs / "run"))
        finally:
            other.kill()
    assert "Another process is working in" in error.message
    assert Run({"layer": 3}, runs / "run").items == {}
