"""Help, the version and completion: the same everywhere, and no file of the user is touched unasked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from preimage.cli.app import app
from support.commands import Typed, process


def commands(group: Any, *above: str) -> Iterator[tuple[str, ...]]:
    """Every command and every group, by the words that name it."""
    yield above
    for name, one in getattr(group, "commands", {}).items():
        yield from commands(one, *above, name)


EVERY = list(commands(get_command(app)))


@pytest.mark.parametrize("words", EVERY, ids=lambda words: " ".join(words) or "preimage")
def test_h_is_help(words: tuple[str, ...], run: Typed) -> None:
    code, short, err = run(*words, "-h")
    assert (code, err) == (0, "")
    assert short == run(*words, "--help")[1]
    assert short.startswith(" ".join(["Usage: preimage", *words]))


def test_the_version_comes_first(run: Typed) -> None:
    code, out, err = run("--version", "no-such-command")
    assert (code, out.split()[0], err) == (0, "preimage", "")


def test_completion_names_commands_and_options(tmp_path: Path) -> None:
    def completed(words: str, at: int) -> set[str]:
        given = {"_PREIMAGE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        done = process(HOME=str(tmp_path), **given)
        assert (done.returncode, done.stderr) == (0, "")
        return set(done.stdout.split())

    assert completed("preimage co", 1) == {"collisions", "continuations"}
    assert completed("preimage theory sy", 2) == {"symmetry"}
    assert "--model" in completed("preimage demo --m", 2)
    assert list(tmp_path.iterdir()) == []


def test_the_script_of_a_shell_is_printed_and_not_put_anywhere(tmp_path: Path) -> None:
    # typer looks for the shell among the processes above; told not to, it takes the one that is named
    for shell in ("bash", "zsh", "fish"):
        done = process(
            "--show-completion", shell, HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "_PREIMAGE_COMPLETE" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_demo_of_another_model(
    document: Any, run: Typed, folders: dict[str, Path], own_cache: Path
) -> None:
    code, out, err = run(
        "demo", "--model", folders["model"]
    )  # the demo's prompts are longer than it can take
    assert (code, out) == (2, "")
    assert "positions" in err or "tokens" in err
    code, found = document("demo", "--model", "no/such/model")
    assert (code, found["error"]["code"]) == (2, "bad_model")
