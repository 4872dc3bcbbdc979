"""The command line: parse, call the library, print.

Exit codes: 0 done; 1 done, and something was not recovered, an unexplained collision was found or a statement
of the theory does not hold; 2 bad input, or an output that cannot be written; 130 interrupted, resumable. 70
is a bug in preimage itself, 141 means that whoever read stdout closed it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

DONE, FINDINGS, BAD_INPUT, BUG, INTERRUPTED, GONE = 0, 1, 2, 70, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``sys.exit`` is the caller's."""
    from preimage.cli.running import run

    return run(list(sys.argv[1:] if argv is None else argv))


def entry() -> None:
    """What the installed ``preimage`` script calls."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character gets its escape
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
