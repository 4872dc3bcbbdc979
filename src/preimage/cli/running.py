"""Running a command: every way it can end becomes an exit code and, with --json, one document."""

from __future__ import annotations

import logging
import sys
import traceback

import typer
from typer.exceptions import TyperException

from preimage.cli import BAD_INPUT, BUG, DONE, INTERRUPTED
from preimage.cli.app import app
from preimage.cli.terminal import print_json, printable
from preimage.errors import PreimageError

_NOISY = ("httpx", "httpx2", "transformers", "filelock", "urllib3", "datasets")


def run(argv: list[str]) -> int:
    """Run the command in ``argv``; nothing but the documented exit codes comes back."""
    as_json = "--json" in argv
    argv = argv or ["--help"]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in (
        "httpx",
        "httpx2",
        "transformers",
        "filelock",
        "urllib3",
        "datasets",
        "torch.utils._pytree",
    ):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        code = app(args=argv, prog_name="preimage", standalone_mode=False)
        if code == INTERRUPTED:  # typer makes this of Ctrl-C, and says nothing
            raise KeyboardInterrupt
        return code if isinstance(code, int) else DONE
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
        line = f"preimage: {error['message']} {error['hint']}".rstrip()
        print(printable(line), file=sys.stderr)
    return code
