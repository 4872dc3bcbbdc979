"""Run folders at an address: the results of a folder, one driver at a time, damage and loss in words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import preimage
from preimage.errors import MissingExtraError, OptionError, RunFolderError, UnwritableError
from preimage.figures.printing import save_figures
from preimage.storage import Run, locking, place_of
from preimage.storage.places import address, exists, names_in, remove_all
from support.jobs import JOBS, PIECES, left_by, outcome
from support.refusing import refused
from support.s3 import Bucket, Gate, serving, settings
from support.tiny import tiny

_MEASURED = re.compile(rb'"(setup_)?seconds": [-+.e\d]+|"sha256": "[0-9a-f]+"')
_BEAT = 0.1
# A driver in a process of its own: which job, where, and after how many pieces it kills itself.
_DRIVER = """
import os, signal, sys
from preimage.storage import Run, locking
from support.jobs import JOBS
locking._BEAT = float(sys.argv[4])
name, out, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
keep = Run.keep
def count(run, *given):
    global left
    keep(run, *given)
    if str(run.path) == out:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
Run.keep = count
JOBS[name](out)
"""
_HOLDER = """
import sys, time
from preimage.storage import Run, locking
locking._BEAT = float(sys.argv[2])
run = Run({"layer": 3}, sys.argv[1])
print("in", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture(scope="module")
def gate(server: int) -> Iterator[Gate]:
    opened = Gate(server)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _client(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings(gate.port).items():
        if name != "PYTHONPATH":  # of processes that are started, not of this one
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(locking, "_BEAT", _BEAT)


@pytest.fixture
def bucket(server: int, _client: None) -> Bucket:
    return Bucket(server, f"bucket-{uuid.uuid4().hex[:12]}")


def items_of(files: dict[str, bytes]) -> dict[str, bytes]:
    """What was kept of each piece, by its key, of a folder or a bucket; but for how long it took."""
    lines = files.get("items.jsonl", b"").splitlines()
    objects = [content for name, content in files.items() if name.startswith("items/")]
    entries = [json.loads(_MEASURED.sub(b'"x": 0', raw)) for raw in (*lines, *objects)]
    return {entry["key"]: json.dumps(entry["item"]).encode() for entry in entries}


def results_of(files: dict[str, bytes]) -> dict[str, bytes]:
    kept = {name: raw for name, raw in files.items() if name == "run.json" or name.endswith(".parquet")}
    return {name: _MEASURED.sub(b"", raw) for name, raw in kept.items()}


def counted(monkeypatch: pytest.MonkeyPatch, out: str) -> list[str]:
    """The keys of pieces that this process finishes from now on."""
    keep, keys = Run.keep, []

    def count(run: Run, key: int | str, item: Any) -> None:
        if str(run.path) == out:
            keys.append(str(key))
        keep(run, key, item)

    monkeypatch.setattr(Run, "keep", count)
    return keys


def python(code: str, port: int, *given: object, **more: Any) -> subprocess.Popen[str]:
    there = settings(port)
    path = os.pathsep.join([str(Path(__file__).parents[1]), there["PYTHONPATH"]])
    command = [sys.executable, "-c", code, *map(str, given)]
    env = os.environ | there | {"PYTHONPATH": path}
    return subprocess.Popen(command, env=env, text=True, **more)


REMOTE = ["collisions", "continuations", "geometry", "invert"]  # a bundle is made on a disk


@pytest.mark.parametrize("name", REMOTE)
def test_a_run_at_an_address_is_that_in_a_folder(name: str, bucket: Bucket, tmp_path: Path) -> None:
    here = JOBS[name](tmp_path / "run")
    there = JOBS[name](bucket.address("deep/run"))
    assert outcome(here) == outcome(there)
    folder = {
        str(path.relative_to(tmp_path / "run")): path.read_bytes()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
    }
    files = bucket.files("deep/run")
    assert results_of(folder) == results_of(files)
    assert items_of(folder) == items_of(files)
    assert len(items_of(files)) == PIECES[name]
    left = {item.partition("/")[0] for item in files if not item.endswith(".parquet")}
    assert left == {"run.json", "items", "record"}  # no sign, no states
    assert outcome(JOBS[name](bucket.address("deep/run"))) == outcome(here)  # found done


@pytest.fixture(scope="module")
def half_done(server: int) -> dict[str, bytes]:
    """What a driver leaves that is killed after two of its pieces."""
    bucket = Bucket(server, "half-done")
    with python(_DRIVER, server, "collisions", bucket.address("run"), 2, _BEAT) as driver:
        assert driver.wait(120) == -signal.SIGKILL
    return bucket.files("run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a folder, undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    JOBS["collisions"](folder)
    return folder


def put_all(bucket: Bucket, files: dict[str, bytes]) -> str:
    """Objects of a run, the last one first: no date of them is what it was."""
    for name, content in reversed(files.items()):
        bucket.write(f"run/{name}", content)
    return bucket.address("run")


def test_a_killed_driver_is_continued(  # J1
    half_done: dict[str, bytes], whole: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = put_all(bucket, half_done)
    assert "driver/0.json" in half_done  # nobody took it down, and it stands still
    finished = {name: raw for name, raw in half_done.items() if name.startswith("items/")}
    assert len(finished) == 2
    assert [name for name in half_done if name.startswith("states/prompts/spread/pieces/")]
    keys, states = counted(monkeypatch, out), counted(monkeypatch, f"{out}/states/prompts/spread")
    there = JOBS["collisions"](out)
    assert (len(keys), states) == (PIECES["collisions"] - 2, [])
    after = bucket.files("run")
    assert {name: after[name] for name in finished} == finished
    assert not [name for name in after if name.startswith(("driver/", "states/"))]
    folder = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    assert (items_of(after), results_of(after)) == (items_of(folder), results_of(folder))
    assert outcome(there) == outcome(JOBS["collisions"](whole))


def test_a_second_driver_is_refused(server: int, bucket: Bucket) -> None:  # J3
    out = bucket.address("run")
    with python(_HOLDER, server, out, _BEAT, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            before = bucket.files("run")
            for plan in ({"layer": 3}, {"layer": 4}):
                error = refused(RunFolderError, lambda plan=plan: Run(plan, out))  # type: ignore[misc]
                assert error.message == f"Another process is working in {out}."
            after = bucket.files("run")
            assert after.pop("driver/0.json") != before.pop("driver/0.json")  # it moves
            assert after == before
        finally:
            other.kill()
    first = Run({"layer": 3}, out)  # its sign stands still now
    again = Run({"layer": 3}, out)
    first.keep("1", {})
    assert set(Run({"layer": 3}, out).items) == {"1"}
    assert [name for name in bucket.files("run") if name.startswith("driver/")] == ["driver/1.json"]
    del first, again
    assert not [name for name in bucket.files("run") if name.startswith("driver/")]


@pytest.mark.parametrize("dead", [True, False], ids=["where one has died", "where nobody was"])
def test_of_many_drivers_at_once_one_works(dead: bool, bucket: Bucket) -> None:
    folder = place_of(bucket.address("run"))
    if dead:
        bucket.write("run/driver/4.json", b'{"holder": "x", "beats": 7}')
    begin, won, lost = threading.Barrier(6), [], []

    def try_it() -> None:
        begin.wait()
        try:
            won.append(locking._Sign(folder))
        except RunFolderError as error:
            lost.append(error.message)

    threads = [threading.Thread(target=try_it) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(won) == 1
    assert set(lost) == {f"Another process is working in {folder}."}
    assert list(bucket.files("run/driver")) == [f"{5 if dead else 0}.json"]
    won[0].take_down()
    assert not bucket.files("run")


def test_who_was_taken_for_dead_stops(bucket: Bucket) -> None:
    run = Run({"layer": 3}, bucket.address("run"))
    run.keep("1", {})
    bucket.write("run/driver/1.json", b'{"holder": "another", "beats": 0}')
    error = refused(RunFolderError, lambda: run.finish(dict))  # it looks before it ends a run
    assert "has taken" in error.message
    assert "continues" in error.hint
    error = refused(RunFolderError, lambda: run.keep("2", {}))
    assert "has taken" in error.message
    del run
    time.sleep(3 * _BEAT)
    assert list(bucket.files("run/driver")) == ["1.json"]  # the other's is left alone
    assert set(items_of(bucket.files("run"))) == {"1"}


def test_a_late_beat_is_noticed_between_pieces(bucket: Bucket) -> None:
    run = Run({"layer": 3}, bucket.address("run"))
    bucket.write("run/driver/1.json", b'{"holder": "another", "beats": 0}')
    time.sleep(5 * _BEAT)
    assert "has taken" in refused(RunFolderError, lambda: run.keep("1", {})).message


def test_a_server_that_is_gone_half_way(
    bucket: Bucket, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model, keep = bucket.address("run"), tiny("llama"), Run.keep

    def close(run: Run, key: int | str, item: Any) -> None:
        keep(run, key, item)
        if str(run.path) == out and key == 1:
            gate.close()

    prompts = [[seed, 7, seed + 1] for seed in range(20)]

    def search(out: str | Path) -> object:
        return preimage.find_collisions(model, prompts, hard_bases=0, closest=3, out=out)

    monkeypatch.setattr(Run, "keep", close)
    try:
        error = refused(UnwritableError, lambda: search(out))
    finally:
        gate.open()
    assert out in error.message
    assert "cannot be written" in error.message
    assert "the same command continues" in error.hint
    monkeypatch.setattr(Run, "keep", keep)
    keys = counted(monkeypatch, out)
    assert outcome(search(out)) == outcome(search(tmp_path / "run"))
    assert len(keys) == PIECES["collisions"] - 2


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ("nothing://bucket/run", RunFolderError, "nothing://bucket/run is no place"),
        ("s3://", RunFolderError, "names no bucket"),
        ("s3:///run", RunFolderError, "names no bucket"),
        ("s3://bucket/run*", RunFolderError, "one of the characters"),
        ("s3://bucket/run?versionId=3", RunFolderError, "one of the characters"),
        ("simplecache::s3://bucket/run", RunFolderError, "before it is whole"),
        ("http://127.0.0.1:9/run", RunFolderError, "before it is whole"),
        ("s3://no-such-bucket/run", UnwritableError, "No such object or bucket"),
    ],
)
def test_bad_addresses(given: str, kind: type[RunFolderError], words: str) -> None:
    assert words in refused(kind, lambda: Run({}, given)).message


def test_a_file_system_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused(MissingExtraError, lambda: Run({}, "gs://bucket/run"))
    assert "preimage[remote]" in error.hint
    monkeypatch.setitem(sys.modules, "upath", None)
    assert "preimage[remote]" in refused(MissingExtraError, lambda: Run({}, "s3://bucket/run")).hint


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    """A server that knows nobody, once there is a bucket."""
    with serving(INITIAL_NO_AUTH_ACTION_COUNT="1") as port:
        Bucket(port, "locked")
        yield port


@pytest.mark.parametrize("given", ["wrong", "none"])
def test_wrong_credentials(given: str, locked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from upath import UPath

    if given == "none":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    place = UPath("s3://locked/run", endpoint_url=f"http://127.0.0.1:{locked}", max_concurrency=len(given))
    error = refused(UnwritableError, lambda: Run({}, place))
    assert "s3://locked/run cannot be written" in error.message
    assert "credentials" in error.hint


@pytest.mark.parametrize(
    ("which", "how"),
    [(which, how) for which in ("run.json", "items/1.json") for how in ("cut", "changed", "emptied")]
    + [("items/1.json", "renamed")],
)
def test_damaged_objects_are_refused_by_name(which: str, how: str, bucket: Bucket) -> None:  # J4
    Run({"layer": 3}, bucket.address("run")).keep("1", {"value": 3})
    raw = bucket.files("run")[which]
    damaged = {"cut": raw[:-5], "changed": raw.replace(b"3", b"4"), "emptied": b"", "renamed": raw}[how]
    name = "items/2.json" if how == "renamed" else which
    bucket.write(f"run/{name}", damaged)
    error = refused(RunFolderError, lambda: Run({"layer": 3}, bucket.address("run")))
    if how == "changed" and which == "run.json":  # its plan, which is compared first
        assert bucket.address("run") in error.message
    else:
        assert bucket.address(f"run/{name}") in error.message


@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_damaged_states_are_refused_by_name(  # J4
    how: str, half_done: dict[str, bytes], whole: Path, bucket: Bucket
) -> None:
    out = put_all(bucket, half_done)
    name = next(name for name in half_done if name.startswith("states/prompts/spread/pieces/"))
    raw = half_done[name]
    if how == "gone":  # with all of them: they are captured again
        bucket.remove(f"run/{name}")
        assert outcome(JOBS["collisions"](out)) == outcome(JOBS["collisions"](whole))
        return
    bucket.write(f"run/{name}", raw[:-40] if how == "cut" else raw[:-8] + b"\xff" * 8)
    error = refused(RunFolderError, lambda: JOBS["collisions"](out))
    assert name.rpartition("/")[2] in error.message


def test_a_place_of_something_else(bucket: Bucket) -> None:
    bucket.write("taken/notes.txt", b"mine")
    bucket.write("file", b"mine")
    for name in ("taken", "file"):
        error = refused(RunFolderError, lambda name=name: Run({}, bucket.address(name)))  # type: ignore[misc]
        assert "exists and is not a run folder" in error.message
    assert bucket.files() == {"taken/notes.txt": b"mine", "file": b"mine"}


def test_removing_leaves_neighbours(bucket: Bucket) -> None:
    for name in ("run/states/a", "run/states-2/b", "run/states.json", "run/"):  # the last stands for a folder
        bucket.write(name, b"")
    folder = place_of(bucket.address("run"))
    assert names_in(folder) == ["states", "states-2", "states.json"]
    remove_all(folder / "states")
    remove_all(folder / "nothing")
    assert not exists(folder / "states")
    assert names_in(folder) == ["states-2", "states.json"]


def test_keys_of_every_kind_come_back(bucket: Bucket) -> None:
    keys = ["a/b", "..", "a b+c%41", "é*?[1]#", "15:0-16", "x" * 200]
    run = Run({}, bucket.address("run"))
    for key in keys:
        run.keep(key, {"key": key})
    assert {key: item["key"] for key, item in Run({}, bucket.address("run")).items.items()} == {
        key: key for key in keys
    }


def test_results_and_figures_at_an_address(bucket: Bucket, tmp_path: Path) -> None:
    import plotly.graph_objects as go

    audit = JOBS["collisions"](bucket.address("run"))
    audit.save(bucket.address("audit.json"))
    assert type(audit).load(bucket.address("audit.json")) == audit
    for folder in (bucket.address("figures"), place_of(bucket.address("figures")), tmp_path):
        save_figures({"one": go.Figure()}, folder)
    assert bucket.files("figures")["one.html"] == (tmp_path / "one.html").read_bytes()


def test_lengths_and_sweeps_have_a_folder_each(bucket: Bucket, tmp_path: Path) -> None:
    model = tiny("llama")
    options = preimage.GeometryOptions(subsets=0)
    prompts = preimage.prompts.PromptOptions(count=6)

    def sweep(out: str | Path) -> object:
        return preimage.sweep_geometry(
            preimage.SweepOptions([model], lengths=(2, 3)),
            "random",
            layers=[1],
            prompts=prompts,
            options=options,
            out=out,
        )

    here, there = sweep(tmp_path / "run"), sweep(bucket.address("run"))
    assert outcome(here) == outcome(there)
    assert {name.rpartition("/")[2] for name in left_by(tmp_path / "run")} - {"items.jsonl"} <= {
        name.rpartition("/")[2] for name in bucket.files("run")
    }


def test_a_bundle_is_on_a_disk(bucket: Bucket) -> None:
    out, model = bucket.address("bundle"), tiny("llama")
    states = preimage.capture(model, [[5, 6, 7]], [1])
    actions: list[Callable[[], object]] = [
        lambda: preimage.capture(model, [[5, 6, 7]], [1], out=out),
        lambda: preimage.open_states(out),
        lambda: preimage.open_states("nothing://bucket/bundle"),
        lambda: states.save(out),
    ]
    for action in actions:
        assert "is an address; a bundle is on a disk" in refused(OptionError, action).message


def test_addresses_that_others_find(bucket: Bucket, tmp_path: Path) -> None:
    assert address(place_of(bucket.address("run"))) == bucket.address("run")
    assert place_of(place_of(bucket.address("run"))).path == f"{bucket.name}/run"  # type: ignore[attr-defined]
    assert place_of(f"file://{tmp_path}/run") == place_of(tmp_path / "run") == tmp_path / "run"
    error = refused(OptionError, lambda: address(place_of("memory://run")))
    assert "memory of this process" in error.message
