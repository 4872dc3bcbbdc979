"""Workers and a run at an address: they go there themselves, or through the driver's machine (N4, J2)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preimage
from preimage.cluster import Cluster, engine
from preimage.geometry.sweeping import measure_model
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, gather
from support.jobs import left_by, outcome
from support.s3 import Bucket, serving, settings

batches = __import__("preimage.states.batches", fromlist=["batches"])


def geometry(model: LanguageModel, out: str | Path) -> object:
    prompts = gather("random", model, PromptOptions(count=60, length=9))
    return measure_model(model, prompts, options=preimage.GeometryOptions(bits=(None, 4), subsets=2), out=out)


def collisions(model: LanguageModel, out: str | Path) -> object:
    prompts = gather("random", model, PromptOptions(count=200, length=9))
    return preimage.find_collisions(model, prompts, hard_bases=2, closest=3, out=out)


def inversion(model: LanguageModel, out: str | Path) -> object:
    states = preimage.capture(model, gather("random", model, PromptOptions(count=6, length=9)), 2)
    return preimage.invert(model, states, out=out)


WORK = [collisions, geometry, inversion]


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 90)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """A server that this process, and whoever it starts, can talk to."""
    with serving() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in settings(port).items():
            patch.setenv(name, value)
        yield port


def new_bucket(server: int) -> Bucket:
    return Bucket(server, f"bucket-{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def alone(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process gives."""
    folder = tmp_path_factory.mktemp("alone")
    return {work.__name__: outcome(work(model, folder / work.__name__)) for work in WORK} | {"in": folder}


def pieces(cluster: Cluster) -> int:
    return sum(stats.pieces for stats in cluster.stats.values())


def same_as_alone(name: str, bucket: Bucket, alone: dict[str, Any]) -> None:
    """Tables to the byte, and nothing left that only the work needed."""
    files = bucket.files("run")
    tables = {path.name: path.read_bytes() for path in (alone["in"] / name).glob("*.parquet")}
    assert {name: raw for name, raw in files.items() if name.endswith(".parquet")} == tables
    kept = {name.partition("/")[0] for name in files} - set(tables)
    assert kept == {"run.json", "items", "record"}


def test_workers_go_to_an_address_themselves(
    model: LanguageModel, server: int, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        """Whoever took the way through the driver's machine would get nothing."""

        def __init__(self, folder: str) -> None:
            pass

    monkeypatch.setattr(engine, "Relay", Broken)
    with Cluster("local", workers=2) as cluster:
        cluster.wait()
        for work in WORK:
            bucket, before = new_bucket(server), pieces(cluster)
            there = work(model, bucket.address("run"))
            assert pieces(cluster) > before + 1
            assert outcome(there) == alone[work.__name__]
            same_as_alone(work.__name__, bucket, alone)


def test_workers_that_see_neither_go_through_the_drivers_machine(
    model: LanguageModel, server: int, alone: dict[str, Any], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(engine.Actor):
        """A worker on a machine that has no credentials and no s3fs, and another disk."""

        def __init__(self, threads: int) -> None:
            import os
            import sys

            super().__init__(threads)
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                del os.environ[name]
            sys.path[:] = [path for path in sys.path if not path.endswith("/s3")]

        def run(self, digest: str, told: Any, folder: dict[str, Any], *more: Any) -> Any:
            address = folder["address"] if "://" in folder["address"] else f"/elsewhere{folder['address']}"
            answer = super().run(digest, told, folder | {"address": address}, *more)
            assert {type(shelf).__name__ for shelf in self._shelves.values()} == {"RelayShelf"}
            return answer

    monkeypatch.setattr(engine, "Actor", Blind)
    bucket = new_bucket(server)
    with Cluster("local", workers=2) as cluster:
        cluster.wait()
        there, here = collisions(model, bucket.address("run")), collisions(model, runs)
        assert pieces(cluster) > 6
    assert outcome(there) == outcome(here) == alone["collisions"]
    same_as_alone("collisions", bucket, alone)
    assert left_by(runs) == left_by(alone["in"] / "collisions")
