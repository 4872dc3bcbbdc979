"""Work done by two workers gives the bytes that one process gives (N4, J2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preimage
from preimage.cluster import Cluster
from preimage.collisions import tiles
from preimage.geometry.sweeping import measure_model
from preimage.models import LanguageModel
from preimage.prompts import PromptOptions, gather
from preimage.storage import working_with
from preimage.training import LensOptions, train_lens
from support.jobs import left_by, outcome

errands = __import__("preimage.collisions.errands", fromlist=["errands"])
batches = __import__("preimage.states.batches", fromlist=["batches"])


def prompts(model: LanguageModel, count: int = 60, length: int = 9) -> Any:
    return gather("random", model, PromptOptions(count=count, length=length))


def collisions(model: LanguageModel, out: Path | None) -> object:
    return preimage.find_collisions(model, prompts(model, 400), hard_bases=2, closest=3, out=out)


def continuations(model: LanguageModel, out: Path | None) -> object:
    return preimage.scan_continuations(model, [[3], [1, 2], [7, 7, 7]], "final", closest=3, out=out)


def geometry(model: LanguageModel, out: Path | None) -> object:
    options = preimage.GeometryOptions(bits=(None, 4), subsets=2)
    return measure_model(model, prompts(model, 120), options=options, out=out)


def propagated(model: LanguageModel, out: Path | None) -> object:
    options = preimage.GeometryOptions(bits=(None, 4), subsets=0, propagate=True)
    return measure_model(model, prompts(model, 20), options=options, out=out)


def inversion(model: LanguageModel, out: Path | None) -> object:
    states = preimage.capture(model, prompts(model, 8), 2)
    return preimage.invert(model, states, out=out)


def brute_force(model: LanguageModel, out: Path | None) -> object:
    states = preimage.capture(model, prompts(model, 4), 2)
    return preimage.invert(model, states, method="brute-force", seed=5, out=out)


def noisy(model: LanguageModel, out: Path | None) -> object:
    states = preimage.capture(model, prompts(model, 3), 2)
    seen = [states.at(index, 2).bfloat16().float() for index in range(3)]
    return preimage.invert(model, seen, 2, prefix=[5], out=out)


def bundle(model: LanguageModel, out: Path | None) -> object:
    return preimage.capture(model, [*prompts(model, 30), *prompts(model, 5, 4)], out=out)


def last_states(model: LanguageModel, out: Path | None) -> object:
    return preimage.capture(
        model, prompts(model, 30), [1, "final"], positions="last", batch_tokens=40, out=out
    )


def keys(model: LanguageModel, out: Path | None) -> object:
    return preimage.capture(model, prompts(model, 30), [1, 2], observe="keys", out=out)


WORK: list[Callable[[LanguageModel, Path | None], Any]] = [
    collisions, continuations, geometry, propagated, inversion, brute_force, noisy, bundle, last_states, keys,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_KEPT_TOKENS", 20)


@pytest.mark.parametrize("kept", [True, False], ids=["in a folder", "in memory"])
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_two_workers_give_the_bytes_of_one_process(
    work: Callable[..., Any], kept: bool, model: LanguageModel, cluster: Cluster, runs: Path
) -> None:
    one = work(model, runs / "one" if kept else None)
    before = sum(stats.pieces for stats in cluster.stats.values())
    with working_with(cluster):
        two = work(model, runs / "two" if kept else None)
    assert sum(stats.pieces for stats in cluster.stats.values()) > before + 1  # it was they who did it
    assert outcome(one) == outcome(two)
    if kept:
        assert left_by(runs / "one") == left_by(runs / "two")


def test_a_run_begun_alone_is_finished_by_workers_and_the_other_way_round(
    model: LanguageModel, cluster: Cluster, runs: Path
) -> None:
    whole = collisions(model, runs / "whole")

    def stop(done: int, total: int, note: str) -> None:
        if note == "layers compared" and done == 2:
            raise KeyboardInterrupt

    def begin(out: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            preimage.find_collisions(
                model, prompts(model, 400), hard_bases=2, closest=3, out=out, progress=stop
            )

    begin(runs / "alone first")
    with working_with(cluster):
        assert outcome(collisions(model, runs / "alone first")) == outcome(whole)
        begin(runs / "workers first")
    assert outcome(collisions(model, runs / "workers first")) == outcome(whole)
    for name in ("alone first", "workers first"):
        assert left_by(runs / name) == left_by(runs / "whole")


def test_tiles_of_few_layers_are_found_by_all_workers(
    model: LanguageModel, cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(out: Path) -> object:
        return preimage.find_collisions(model, prompts(model, 600, 6), [2, 3], hard_bases=0, out=out)

    one = search(runs / "one")
    monkeypatch.setattr(tiles, "MANY", 1)
    monkeypatch.setattr(errands, "MANY", 1)
    screened: list[str] = []

    def watch(done: int, total: int, note: str) -> None:
        screened.append(note)

    with working_with(cluster):
        two = preimage.find_collisions(
            model, prompts(model, 600, 6), [2, 3], hard_bases=0, out=runs / "two", progress=watch
        )
    assert "tiles screened" in screened
    assert outcome(one) == outcome(two)
    assert left_by(runs / "one") == left_by(runs / "two")


def test_text_for_a_lens_is_sampled_by_workers(model: LanguageModel, cluster: Cluster, runs: Path) -> None:
    options = LensOptions(steps=2, batch_tokens=64, length=8, rank=8, hidden=16, sampled_tokens=6000)
    train_lens(model, 2, options=options, out=runs / "one.safetensors")
    with working_with(cluster):
        train_lens(model, 2, options=options, out=runs / "two.safetensors")
    assert (runs / "one.safetensors").read_bytes() == (runs / "two.safetensors").read_bytes()
