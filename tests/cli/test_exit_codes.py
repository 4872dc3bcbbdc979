"""Wrong usage, help, interrupts, bugs and missing extras: one exit code each (C2)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from preimage.cli import main
from support.commands import Typed


def test_demo_without_its_model(document: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREIMAGE_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, found = document("demo")
    assert code == 2
    assert "smollm2 is not in the cache" in found["error"]["message"]


@pytest.mark.parametrize(
    "argv",
    [
        ["invert", "--no-such-option"],
        ["no-such-command"],
        ["capture", "--text", "x"],  # --out is missing
        ["invert", "--seed", "many"],
        ["bench"],
        ["bench", "nothing"],
        ["models", "one", "two"],
        ["doctor", "--json=yes"],
    ],
    ids=" ".join,
)
def test_wrong_usage(argv: list[str], document: Any, run: Typed) -> None:
    code, found = document(*argv)
    assert code == 2
    assert found.keys() == {"error"}
    assert found["error"]["code"] == "usage"
    assert found["error"]["message"]
    assert found["error"]["hint"] == "Run it with --help to see what is allowed."
    if argv != ["bench"]:  # which shows its help instead
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1


def test_help_and_nothing_at_all(run: Typed) -> None:
    for argv in ([], ["--help"], ["invert", "--help"], ["bench", "--help"]):
        code, out, err = run(*argv)
        assert code == 0
        assert "Usage: preimage" in out
        assert err == ""


def test_an_interrupt_is_exit_code_130(
    document: Any, run: Typed, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("preimage.models.loading.load", interrupted)
    code, found = document("models", model)
    assert code == 130
    assert found["error"]["code"] == "interrupted"
    code, out, err = run("models", model)
    assert (code, out) == (130, "")
    assert err == ("preimage: Interrupted. A run with --out continues when the same command is run again.\n")


def test_a_bug_is_none_of_the_documented_codes(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("preimage.models.loading.load", broken)
    assert main(["models", model, "--json"]) == 70
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["message"] == "ZeroDivisionError: by hand"
    assert "Traceback" in captured.err


def test_a_missing_extra_is_named(
    document: Any, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # C3
    monkeypatch.setitem(sys.modules, "datasets", None)
    out = tmp_path / "b"
    code, found = document("capture", "--model", model, "--prompts", "datasets:someone/data", "--out", out)
    assert code == 2
    assert found["error"] == {
        "code": "missing_extra",
        "message": "datasets:someone/data needs the datasets package, which is not installed.",
        "hint": 'Install it: pip install "preimage[data]"',
    }
    assert not out.exists()
