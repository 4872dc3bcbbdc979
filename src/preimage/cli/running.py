"""Running a command: every way it can end becomes an exit code and, with --json, one document."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import redirect_stdout, suppress
from typing import TextIO, cast

import typer
from typer.exceptions import TyperException

from preimage.cli import BAD_INPUT, BUG, DONE, GONE, INTERRUPTED
from preimage.cli.app import app
from preimage.cli.terminal import OutputError, Stdout, print_json, printable
from preimage.errors import PreimageError

_NOISY = (
    "httpx",
    "httpx2",
    "transformers",
    "accelerate",
    "filelock",
    "urllib3",
    "datasets",
    "torch.utils._pytree",
)


def run(argv: list[str]) -> int:
    """Run the command in ``argv``; nothing but the documented exit codes comes back."""
    if sys.stdout is None:
        return _cannot_write("it is closed")
    stdout = sys.stdout
    try:
        with redirect_stdout(cast(TextIO, Stdout(stdout))):
            code = _command(argv or ["--help"])
            sys.stdout.flush()
        return code
    except OutputError as error:
        _let_go(stdout)
        if isinstance(error.reason, BrokenPipeError):  # whoever read it has seen enough
            return GONE
        return _cannot_write(error.reason.strerror or str(error.reason))


def _command(argv: list[str]) -> int:
    as_json = "--json" in argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        code = app(args=argv, prog_name="preimage", standalone_mode=False)
        if code == INTERRUPTED:  # typer makes this of Ctrl-C, and says nothing
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
    except OutputError:
        raise
    except PreimageError as error:
        return _fail(as_json, BAD_INPUT, error.to_dict())
    except TyperException as error:  # an unknown option, a missing argument
        hint = "Run it with --help to see what is allowed."
        return _fail(as_json, BAD_INPUT, {"code": "usage", "message": error.format_message(), "hint": hint})
    except typer.Exit as leaving:
        return leaving.exit_code
    except (KeyboardInterrupt, typer.Abort):
        hint = "A run with --out continues when the same command is run again."
        return _fail(as_json, INTERRUPTED, {"code": "interrupted", "message": "Interrupted.", "hint": hint})
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        hint = "This is a bug in preimage; please report it with the traceback above."
        return _fail(as_json, BUG, {"code": "internal", "message": message, "hint": hint})


def _fail(as_json: bool, code: int, error: dict[str, str]) -> int:
    if as_json:
        print_json({"error": error})
    else:
        _say(error["message"], error["hint"])
    return code


def _cannot_write(reason: str) -> int:
    _say(f"stdout cannot be written: {reason}.", "Give it another place; what --out keeps is kept.")
    return BAD_INPUT


def _say(message: str, hint: str) -> None:
    """One line on stderr, where there is one."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(printable(f"preimage: {message} {hint}".rstrip()), file=sys.stderr, flush=True)


def _let_go(stdout: TextIO) -> None:
    """Python writes what is left at its end, and would complain once more: that goes nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stdout.fileno())
        os.close(nowhere)
        stdout.flush()
