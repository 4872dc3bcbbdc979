"""progress=True: one bar, named by the stage; nothing without it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import preimage
from preimage import theory
from preimage.errors import OptionError
from preimage.progress import reporting
from support.refusing import refused
from support.shown_results import IDS, spoken


def bar(captured: str) -> str:
    """What a terminal shows in the end of what was written over itself."""
    return captured.rstrip("\n").rpartition("\r")[2].rpartition("\n")[2]


DOORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "capture": (lambda p: preimage.capture(spoken(), IDS, layers=1, progress=p), "prompts captured"),
    "invert": (
        lambda p: preimage.invert(
            spoken(), preimage.capture(spoken(), IDS, layers=1), progress=p, proposers="prior"
        ),
        "prompts inverted",
    ),
    "find_collisions": (
        lambda p: preimage.find_collisions(spoken(), IDS, layers=1, hard_bases=0, progress=p),
        "layers compared",
    ),
    "scan_continuations": (
        lambda p: preimage.scan_continuations(spoken(), IDS[:1], layer=1, progress=p),
        "prefixes",
    ),
    "measure_geometry": (
        lambda p: preimage.measure_geometry(preimage.capture(spoken(), IDS, layers=1), subsets=0, progress=p),
        "layers measured",
    ),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_bar_is_drawn_to_its_end_and_none_unasked(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    call, stage = DOORS[name]
    call(True)
    drawn = bar(capfd.readouterr().err)
    assert drawn.startswith(f"{stage}: 100%"), drawn
    done, total = re.search(r"(\d+)/(\d+) \[", drawn).groups()  # type: ignore[union-attr]
    assert done == total
    for silent in (False, None):
        call(silent)
        assert capfd.readouterr() == ("", "")


def test_every_door_that_takes_progress_takes_true() -> None:
    rooms = (preimage, theory)
    doors = [getattr(room, name) for room in rooms for name in room.__all__ if name != "reproduce"]
    taking = [
        door
        for door in doors
        if inspect.isfunction(door) and "progress" in inspect.signature(door).parameters
    ]
    assert len(taking) >= 14
    for door in taking:
        assert inspect.signature(door).parameters["progress"].annotation == "Listener", door


def test_stages_are_named_and_an_error_ends_the_bar(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with reporting(True) as report:
            report(0, 2, "first")
            report(2, 2, "first")
            report(0, 0, "second \x1b[31m")
            report(5, 0, "second \x1b[31m")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    drawn = capfd.readouterr().err
    assert drawn.endswith("\n")
    assert "first: 100%" in drawn
    assert bar(drawn).startswith("'second \\x1b[31m': 5it")
    assert "\x1b[31m" not in drawn


@pytest.mark.parametrize("given", ["yes", 1, 0.5, []], ids=repr)
def test_what_is_no_listener_is_refused(given: Any) -> None:
    def ask() -> None:
        with reporting(given):
            pass

    error = refused(OptionError, ask)
    assert error.message == f"progress is {given!r}."


def test_whoever_listens_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    preimage.capture(spoken(), IDS, layers=1, progress=lambda *one: told.append(one))
    assert told[-1] == (4, 4, "prompts captured")
