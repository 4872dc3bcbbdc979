"""``preimage bench``: what is measured is what was done."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

import preimage
from preimage.bench import inverting
from preimage.inversion.result import Inversion
from preimage.states import States
from support.commands import LAYERS, Typed
from support.folders import VOCABULARY
from support.tiny import random_ids


def test_bench_capture(document: Any, run: Typed, model: str) -> None:
    given = ["bench", "capture", "--model", model, "--count", 2, "--length", 4, "--rounds", 1]
    code, found = document(*given)
    assert code == 0
    assert (found["schema"], found["command"]) == ("preimage/9", "bench capture")
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
    assert (
        row["speedup_over_sipit"] == row["seconds_per_token"]["published"] / row["seconds_per_token"]["fast"]
    )
    assert row["verified_tokens"] == {"fast": 3, "sipit": 3, "published": 3}
    code, out, _ = run(*given)
    assert code == 0
    assert out.startswith("layer 1: 2 of 2 exact (2 recovered), median ")
    code, found = document(*given, "--sipit-seconds", 1e-9)  # stopped before anything was verified
    row = found["layers"]["1"]
    assert (code, row["verified_tokens"]) == (0, {"fast": 3, "sipit": 0, "published": 0})
    assert (row["speedup_over_sipit"], row["speedup_over_cached_sipit"]) == (None, None)
    assert row["seconds_per_token"]["published"] is None
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
    assert found["seconds_per_token"] == {"fast": 0.6 / 6, "sipit": 1.5, "published": 1.5}
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
