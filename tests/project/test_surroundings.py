"""The tests do not depend on the machine: examples, signals, terminal, language, files of the user."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preimage.models import cache_folder
from support.surroundings import PYTHON, settle


def drawn() -> list[tuple[int, str, str]]:
    """The examples of one small test."""
    found = []

    @settings(max_examples=200)
    @given(st.integers(), st.floats(), st.text())
    def examine(whole: int, real: float, text: str) -> None:
        found.append((whole, repr(real), text))

    examine()
    return found


def test_examples_are_the_same_whatever_was_imported(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.config.getoption("--hypothesis-profile") == "search":
        pytest.skip("make search: new examples are wanted")
    assert (settings.default.derandomize, settings.default.database) == (True, None)
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
    before = drawn()
    assert drawn() == before
    (tmp_path / "imported_meanwhile.py").write_text(
        "NUMBERS = (918_273_645, 123.4375, 'a word of its own')\n" * 40
    )
    monkeypatch.syspath_prepend(tmp_path)
    __import__("imported_meanwhile")
    assert drawn() == before


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_started_process_can_be_interrupted(disposition: signal.Handlers) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, disposition)
    try:
        plain, ours = (
            subprocess.run([*start, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
            for start in ((sys.executable,), PYTHON)
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert plain == str(disposition is signal.SIG_DFL)
    assert ours == "True"


def test_terminal_language_and_caches_are_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    strange = {
        "COLUMNS": "20", "FORCE_COLOR": "1", "NO_COLOR": "1", "TTY_COMPATIBLE": "1", "LC_ALL": "C",
        "TERM": "xterm-256color", "TZ": "Asia/Kathmandu", "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "9",
        "PREIMAGE_CACHE": "/somewhere", "HF_HOME": "/somewhere",
    }  # fmt: skip
    for name, value in strange.items():
        monkeypatch.setenv(name, value)
    settle()
    changed = {name: os.environ.get(name) for name in strange}
    assert changed == {name: before.get(name) for name in strange}
    assert cache_folder().parent.name.startswith("preimage-tests-")
    assert torch.get_num_threads() == 1


COMMANDS: dict[str, list[str]] = {
    "doctor": ["doctor"],
    "document": ["lens", "list", "--json"],
    "refusal": ["models", "no-such-modèl"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_command_says_the_same_in_any_surroundings(arguments: list[str]) -> None:
    def said(**environment: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "preimage", *arguments],
            env=os.environ | environment, capture_output=True, encoding="utf-8", check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    plain = said()
    assert "Traceback" not in plain[2]
    assert said(LC_ALL="C", LANG="C", TZ="Asia/Kathmandu", COLUMNS="30", TERM="xterm-256color",
                NO_COLOR="1", PYTHONHASHSEED="7") == plain  # fmt: skip
