"""What may be different where a job is continued, and what may not (J2); and clocks that are wrong."""

from __future__ import annotations

import datetime
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import preimage
from preimage.distances import norms
from preimage.errors import RunFolderError
from preimage.models import LanguageModel
from preimage.states import SAFETY
from preimage.storage import SCHEMA, records
from support.jobs import JOBS, PREFIXES, PROMPTS, finished_pieces, kill_at, left_by, outcome
from support.refusing import refused
from support.tiny import build, random_ids, tiny


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", JOBS)
def test_a_folder_that_was_moved_is_continued(
    name: str, undisturbed: dict[str, Path], half_done: dict[str, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(half_done[name], tmp_path / "first place")
    finished = finished_pieces(out)
    moved = out.rename(tmp_path / "elsewhere")
    assert len(finished) == 2
    assert outcome(JOBS[name](moved)) == outcome(JOBS[name](undisturbed[name]))
    assert left_by(moved) == left_by(undisturbed[name])
    assert not out.exists()


@pytest.mark.parametrize(("first", "then"), [(1, 64), (64, 1), (6, 11)])
def test_a_capture_is_continued_in_other_batches(first: int, then: int, tmp_path: Path) -> None:
    """Bits depend on the batch: what was finished keeps its own, the rest is the same but for noise."""
    capture, out = JOBS["capture"], tmp_path / "bundle"
    assert kill_at(lambda out: capture(out, batch_tokens=first), out, piece=2)
    done = int(finished_pieces(out)[-1].split(b'"')[3].split(b"-")[1])
    assert 0 < done < len(PROMPTS)
    states = capture(out, batch_tokens=then)
    one, other = (preimage.capture(tiny("llama"), PROMPTS, batch_tokens=size) for size in (first, then))
    in_order = sorted(range(len(PROMPTS)), key=lambda prompt: len(PROMPTS[prompt]))
    assert states.noise_floor == one.noise_floor
    for layer in states.layers:
        for prompt in in_order[:done]:
            assert torch.equal(states.at(prompt, layer), one.at(prompt, layer))
        for prompt in in_order[done:]:
            expected = other.at(prompt, layer)
            radius = SAFETY * states.noise_floor[layer] * norms(expected)
            assert (norms(states.at(prompt, layer).double() - expected.double()) <= radius).all()


def half_precision() -> LanguageModel:
    return preimage.load(build("llama", dtype=torch.bfloat16))


OTHERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "model": lambda name: {"model": tiny("llama", seed=1)},
    "dtype": lambda name: {"model": half_precision()},
    "prompts": lambda name: {
        "prompts": [*(PREFIXES if name == "continuations" else PROMPTS)[:-1], random_ids(9, 77)]
    },
}
# What the prompts are called where they are not seen as such.
CALLED = {("continuations", "prompts"): "prefixes", ("invert", "prompts"): "states"}


@pytest.mark.parametrize("changed", OTHERS)
@pytest.mark.parametrize("name", JOBS)
def test_other_work_is_refused_by_the_field_and_the_first_goes_on(
    name: str, changed: str, undisturbed: dict[str, Path], half_done: dict[str, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(half_done[name], tmp_path / "out")
    before = files_of(out)
    error = refused(RunFolderError, lambda: JOBS[name](out, **OTHERS[changed](name)))
    assert "was begun with another " in error.message
    said = error.message.split("was begun with another ")[1]
    field = CALLED.get((name, changed), changed)
    assert f"{field} " in said or f"{field}: " in said
    assert files_of(out) == before
    JOBS[name](out)
    assert left_by(out) == left_by(undisturbed[name])


@pytest.mark.parametrize("name", JOBS)
def test_a_schema_of_another_version_is_refused_by_name(
    name: str, half_done: dict[str, Path], tmp_path: Path
) -> None:
    out = shutil.copytree(half_done[name], tmp_path / "out")
    path = out / "capture" / "run.json" if name == "capture" else out / "run.json"
    path.write_bytes(path.read_bytes().replace(SCHEMA.encode(), b"preimage/0"))
    before = files_of(out)
    error = refused(RunFolderError, lambda: JOBS[name](out))
    # by its schema, or as altered where a checksum is looked at first
    assert f'another schema: "preimage/0", now "{SCHEMA}"' in error.message or str(path) in error.message
    assert files_of(out) == before


# --- clocks -----------------------------------------------------------------------------------


class _Yesterday(datetime.datetime):
    """A clock that was set back: every look at it is a day before the last one."""

    looks = 0

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        cls.looks += 1
        return datetime.datetime(2001, 1, 1, tzinfo=tz) - datetime.timedelta(days=cls.looks)


@pytest.mark.parametrize("name", JOBS)
def test_nothing_depends_on_the_clock_or_on_dates_of_files(
    name: str,
    undisturbed: dict[str, Path],
    half_done: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out, drawn = shutil.copytree(half_done[name], tmp_path / "out"), random.Random(name)
    for path in sorted(out.rglob("*")):
        date = drawn.choice([0, 86_400, 2**31, 2**33])  # 1970, a day later, 2038 and 2242
        os.utime(path, (date, date))
    monkeypatch.setattr(records, "datetime", _Yesterday)
    monkeypatch.setattr(time, "time", lambda: drawn.uniform(0, 2**33))
    _Yesterday.looks = 0
    result = JOBS[name](out)
    assert _Yesterday.looks  # the record was made by that clock
    assert left_by(out) == left_by(undisturbed[name])
    assert outcome(result) == outcome(JOBS[name](undisturbed[name]))
    assert outcome(JOBS[name](out)) == outcome(result)  # and a finished one is read the same
