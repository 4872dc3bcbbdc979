"""What a command does on its way, and that it does nothing twice (docs/architecture.md, "Walks")."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from preimage import preparation
from preimage.cli import main
from preimage.models import identity, loading, locating, preview
from preimage.prompts import gathering
from preimage.states import bundle as bundles
from preimage.states.states import States
from preimage.storage import manifest

STEPS = {
    "locate": locating.locate,
    "preview": preview.read_preview,
    "load": loading._from_folder,
    "gather": gathering.gather,
    "hash of the files": identity.hash_files,
    "hash of the weights": identity.weight_hash,
    "manifest": manifest.read_manifest,
    "bundle": bundles.open_bundle,
    "finite": States.require_finite,
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each step is made."""
    codes: dict[CodeType, str] = {}
    for name, step in STEPS.items():
        while hasattr(step, "__wrapped__"):  # the checks of shapes
            step = step.__wrapped__
        codes[step.__code__] = name
    counts: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        name = codes.get(frame.f_code) if event == "call" else None
        caller = frame.f_back
        if name == "gather" and caller and caller.f_code.co_filename != preparation.__file__:
            return  # not the command's prompts: a proposer's own text, or what a lens is held against
        if name:
            counts[name] += 1

    sys.setprofile(watch)
    try:
        yield counts
    finally:
        sys.setprofile(None)


ONCE = dict.fromkeys(("locate", "preview", "load", "gather", "hash of the files", "hash of the weights"), 1)
READ = {"manifest": 1, "bundle": 1, "finite": 1}
COMMANDS: dict[str, tuple[list[str], dict[str, int]]] = {
    "invert a bundle": (["invert", "BUNDLE", "--layer", "2"], ONCE | READ | {"gather": 0}),
    "invert": (["invert", "--text", "a cat", "--text", "the dog", "--layer", "2"], ONCE),
    "capture": (["capture", "--text", "a cat", "--layers", "2", "--out", "OUT"], ONCE),
    "collisions": (["collisions", "--prompts", "random", "--count", "8", "--length", "4"], ONCE),
    "collisions in a folder": (
        ["collisions", "--prompts", "random", "--count", "8", "--length", "4", "--out", "OUT"],
        ONCE,
    ),
    "continuations": (["continuations", "--text", "a cat", "--layer", "1"], ONCE),
    "geometry": (["geometry", "--prompts", "random", "--count", "8", "--length", "4"], ONCE),
    "geometry in a folder": (
        ["geometry", "--prompts", "random", "--count", "8", "--length", "4", "--out", "OUT"],
        ONCE,
    ),
    "theory symmetry": (["theory", "symmetry", "--text", "a cat", "--text", "the dog"], ONCE),
    "lens train": (
        ["lens", "train", "--layer", "1", "--prompts", "random", "--steps", "1", "--out", "OUT"],
        ONCE | {"gather": 0, "hash of the files": 0},  # a lens is tied to weights
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_step_is_made_twice(
    name: str, model: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, expected = COMMANDS[name]
    places = {"BUNDLE": str(bundle), "OUT": str(tmp_path / "out")}
    with counted() as counts:
        code = main([*(places.get(part, part) for part in given), "--model", model, "--json"])
    assert code == 0, capsys.readouterr().out
    kept = {step: counts[step] for step in expected}
    assert kept == expected
