"""The terminal (W7): nothing printed can steer it, and a stdout that fails is one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preimage.cli.terminal import printable
from support.commands import Typed, process

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_what_is_printed_cannot_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not any(unicodedata.category(char) in HIDDEN for char in shown)
    shown.encode("utf-8")  # no lone surrogates
    assert printable(shown) == shown
    visible = [char for char in text if unicodedata.category(char) not in HIDDEN]
    if len(visible) == len(text):
        assert shown == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\r\tc\x00\x7f\x9b", r"a\nb\r\tc\x00\x7f\x9b"),
        ("\u202eevil\u2066\u200b\ufeff", r"\u202eevil\u2066\u200b\ufeff"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800", r"\ud800"),
        ("naïve 日本 🙂", "naïve 日本 🙂"),
        ("[bold]no markup[/bold]", "[bold]no markup[/bold]"),
    ],
)
def test_escapes(raw: str, shown: str) -> None:
    assert printable(raw) == shown


def test_recovered_text_is_escaped_in_the_table_and_whole_in_the_document(
    run: Typed, document: Any, model: str
) -> None:
    text = "\x1b]0;x\x07\u202e[b]\r\n"
    given = ["invert", "--model", model, "--text", text, "--layer", 1, "--method", "brute-force"]
    code, out, _ = run(*given)
    assert code == 0
    assert r"<s>\x1b]0;x\x07\u202e[b]\r\n" in out
    assert not any(unicodedata.category(char) in HIDDEN for char in out.replace("\n", ""))
    code, found = document(*given)
    assert code == 0
    assert found["results"][0]["text"] == "<s>" + text


def test_names_in_errors_are_escaped(run: Typed) -> None:
    code, _, err = run("models", "no\x1b[2Jsuch\nmodel")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "\x1b" not in err
    code, _, err = run("invert", "no\x1b[2Jsuch\nbundle")
    assert code == 2
    assert r"no\x1b[2Jsuch\nbundle is not a state bundle" in err
    assert len(err.splitlines()) == 1


def test_a_terminal_without_the_characters_gets_escapes(folders: dict[str, Path], tmp_path: Path) -> None:
    named = shutil.copytree(folders["model"], tmp_path / "modèle")
    done = process("models", "--fetch", named, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/mod\\xe8le is ready in {tmp_path}/mod\\xe8le\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NO /dev/full: a full stdout is not tested")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "argv", [["--help"], ["models"], ["models", "--json"], ["models", "no/such", "--json"]], ids=" ".join
)
def test_a_stdout_that_cannot_be_written_is_one_line(argv: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "preimage", *argv]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("preimage: stdout cannot be written: No space left on device.")
    assert len(done.stderr.splitlines()) == 1
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (closed.returncode, len(closed.stderr.splitlines())) == (2, 1)
    reader, writer = os.pipe()
    os.close(reader)  # whoever read has gone, as `head` does
    gone = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, "")
