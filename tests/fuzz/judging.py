"""How a case must end: in success or one short error, soon, in little memory, and touching nothing else."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from preimage.errors import PreimageError

SECONDS = 10.0  # of computing, for a case of a few kilobytes
MEMORY = 256 << 20  # bytes by which one case may raise the peak of the process
ADDRESSES = 4 << 30  # bytes of address space it may ask for: what is beyond would endanger the machine
MESSAGE = 2000  # characters: paths of temporary folders come in it, what a file holds does so cut short
SOURCE = f"{os.sep}preimage{os.sep}"

# What nothing that reads a file has to do: run a program or a pickle, talk to another machine.
_NEVER = {
    "os.exec", "os.fork", "os.posix_spawn", "os.system", "pickle.find_class", "socket.bind", "socket.connect",
    "socket.getaddrinfo", "socket.sendto", "subprocess.Popen",
}  # fmt: skip
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.truncate", "os.mkdir", "os.symlink", "os.link"}
_watching = False


class Fault(Exception):  # noqa: N818  # it is the reader that erred
    """A case that did not end as it must; ``place`` is where, the same for all cases of one fault."""

    def __init__(self, what: str, place: str) -> None:
        super().__init__(f"{what} ({place})")
        self.what, self.place = what, place


class Overstepped(BaseException):
    """Too long, or a deed that is never done: no ``except Exception`` of a reader may hide it."""


def judge(run: Callable[[bytes], object], data: bytes) -> bool:
    """Whether a case was accepted; False: refused in words. Anything else is a :class:`Fault`."""
    _forget_peak()
    before = _peak()
    try:
        with _bounded():
            run(data)
        accepted = True
    except PreimageError as error:
        check_words(error)
        accepted = False
    except Fault:
        raise
    except (Exception, Overstepped) as error:
        lines = str(error).strip().splitlines() or [""]
        raise Fault(f"{type(error).__name__}: {lines[0][:200]}", _place(error)) from error
    grown = _peak() - before
    if grown > MEMORY:
        raise Fault(f"{grown >> 20} MiB of memory for {len(data)} bytes", "memory")
    return accepted


def scratch() -> Path:
    """The one folder a case may write into, for this process."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="preimage-fuzz-")
    return Path(_folder.name)


_folder: tempfile.TemporaryDirectory[str] | None = None


@contextmanager
def _bounded() -> Iterator[None]:
    """Limits of one case on this thread; they are lifted behind it."""
    global _watching
    main = threading.current_thread() is threading.main_thread()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _too_long) if main else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what other libraries say of odd files harms nobody
        scratch()  # there before anybody is watched who makes it
        _watch()
        try:
            _limit(_addresses() + ADDRESSES, usual[1])
            if main:
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # of this process, however busy others are
            _watching = True
            yield
        finally:
            _watching = False
            if main:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.signal(signal.SIGVTALRM, handler)
            resource.setrlimit(resource.RLIMIT_AS, usual)


def _limit(addresses: int, hard: int) -> None:
    soft = addresses if hard == resource.RLIM_INFINITY else min(addresses, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Overstepped(f"more than {SECONDS:.0f} s")


def _watch() -> None:
    """Have Python tell of every deed from now on; a hook stays, and is silent between cases."""
    global _told
    if not _told:
        _told = True
        sys.addaudithook(_hook)


_told = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in _NEVER:
        raise Overstepped(event)
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike) and _writes(args[1], args[2]):
        _require_inside(event, args[0])
    elif event in _CHANGES and isinstance(args[0], str | bytes | os.PathLike) and args[-1] in (None, -1):
        _require_inside(event, args[0])  # of a name in an open folder nobody knows where that is


def _writes(mode: str | None, flags: int | None) -> bool:
    if mode is not None:
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def _require_inside(event: str, path: Any) -> None:
    name = os.path.abspath(os.fsdecode(path))
    if not name.startswith(str(scratch())) and name != os.devnull:
        raise Overstepped(f"{event} {name}")


def check_words(error: PreimageError) -> None:
    """A refusal is one short line and a hint."""
    text = str(error)
    if len(text) > MESSAGE:
        raise Fault(f"a message of {len(text)} characters: {text[:100]}…", _place(error)) from error
    if "\n" in text:
        raise Fault(f"a message of several lines: {text[:200]!r}", _place(error)) from error
    if not error.hint:
        raise Fault(f"a message without a hint: {text[:200]}", _place(error)) from error


def _place(error: BaseException) -> str:
    """The last function of preimage that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if SOURCE in frame.filename and "/fuzz/" not in frame.filename]
    last = (ours or list(frames))[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}:{last.name}"


def _forget_peak() -> None:
    """Have the peak begin anew, on Linux; elsewhere a case is seen that goes beyond all before it."""
    with suppress(OSError), Path("/proc/self/clear_refs").open("w", encoding="ascii") as file:
        file.write("5")


def _peak() -> int:
    """Bytes in memory at most; what getrusage says begins with the peak of whoever started this process."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_bytes()
        return int(status.partition(b"VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _addresses() -> int:
    """Address space in use; without /proc as good as none, and then nothing is said by the limit."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return resource.RLIM_INFINITY >> 1 if resource.RLIM_INFINITY > 0 else 1 << 62
    return pages * resource.getpagesize()
