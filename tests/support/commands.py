"""Commands as a user types them, run in a process of their own."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

from support.surroundings import PYTHON

LAYERS, WIDTH, CONTEXT = 3, 32, 128


Typed = Callable[..., tuple[int, str, str]]


def process(*argv: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "preimage", *map(str, argv)],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


# The command as it is, but for one method that, called so often, says so and then waits to be interrupted:
# neither a slow machine nor a quick one changes where Ctrl-C finds it.
WAITING = """
import importlib, sys, time
home, kind, method, times = sys.argv[1:5]
owner = getattr(importlib.import_module(home), kind)
work, calls = getattr(owner, method), 0

def then_wait(*given):
    global calls
    work(*given)
    calls += 1
    if calls == int(times):
        print("now", file=sys.stderr, flush=True)
        time.sleep(3600)

setattr(owner, method, then_wait)
from preimage.cli import entry
sys.argv[1:] = sys.argv[5:]
entry()
"""


def interrupted(home: str, kind: str, method: str, times: int, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets Ctrl-C after so many calls of a method."""
    command = [*PYTHON, "-c", WAITING, home, kind, method, str(times), *map(str, argv)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            said = child.stderr.readline()
            assert said == "now\n", said + child.stderr.read()
            child.send_signal(signal.SIGINT)
            stdout, stderr = child.communicate()
        finally:
            child.kill()
    return child.returncode, stdout, stderr


def on_a_terminal(width: int, *argv: object, **environment: str) -> str:
    """What a command shows on a real terminal of so many columns, stdout and stderr together."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-m", "preimage", *map(str, argv)]
    surroundings = os.environ | {"TERM": "xterm", "NO_COLOR": "1"} | environment
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=surroundings):
        os.close(theirs)
        shown = b""
        while part := _read(ours):
            shown += part
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that nobody writes any more
        return b""
