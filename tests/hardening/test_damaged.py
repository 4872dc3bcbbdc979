"""A truncated or altered file of a run is refused by name, or does not matter (J4)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from preimage.errors import PreimageError
from support.jobs import JOBS, left_by, outcome


def flipped(content: bytes, drawn: random.Random) -> bytes:
    raw = bytearray(content)
    raw[drawn.randrange(len(raw))] ^= 1 << drawn.randrange(8)
    return bytes(raw)


def truncated(content: bytes, drawn: random.Random) -> bytes:
    return content[: drawn.randrange(len(content))]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [flipped, truncated]


def tried(work: Callable[[], object]) -> tuple[PreimageError | None, object]:
    """Why work was refused, and what came of it where it was not."""
    try:
        return None, work()
    except PreimageError as error:
        return error, None


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", JOBS)
def test_no_damage_goes_unnoticed(
    name: str,
    damage: Callable[[bytes, random.Random], bytes],
    undisturbed: dict[str, Path],
    half_done: dict[str, Path],
    tmp_path: Path,
) -> None:
    drawn, expected = random.Random(f"{name} {damage.__name__}"), left_by(undisturbed[name])
    found = outcome(JOBS[name](shutil.copytree(undisturbed[name], tmp_path / "whole")))
    files = [path for path in sorted(half_done[name].rglob("*")) if path.is_file() and path.stat().st_size]
    refusals, number = 0, 0
    for path in (path for path in files if path.name != "record.jsonl"):  # which nobody reads
        for _ in range(4):
            number += 1
            out = shutil.copytree(half_done[name], tmp_path / str(number))
            place = out / path.relative_to(half_done[name])
            place.write_bytes(damage(path.read_bytes(), drawn))
            refusal, result = tried(lambda out=out: JOBS[name](out))
            if refusal is not None:
                refusals += 1
                assert refusal.hint
                assert str(out) in refusal.message, refusal.message
            else:
                assert outcome(result) == found, place
                assert left_by(out) == expected, place
    assert refusals
