"""One process at a time in a run folder; the lock goes with the process, however that ends."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from preimage.errors import RunFolderError

_held: dict[Path, tuple[int, int]] = {}  # folder: its descriptor, and how many here have it open


def hold(folder: Path, owner: object) -> None:
    """Keep other processes out of ``folder`` as long as ``owner`` lives; this one may enter again.

    Where folders cannot be locked (some network disks, no POSIX) nobody is kept out.
    """
    try:
        import fcntl
    except ImportError:
        return
    place = folder.resolve()
    descriptor, users = _held.get(place, (-1, 0))
    if not users:
        descriptor = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise RunFolderError(
                f"Another process is working in {folder}.", "Wait until it is done, or give another folder."
            ) from None
        except OSError:  # no locks here
            os.close(descriptor)
            return
    _held[place] = (descriptor, users + 1)
    weakref.finalize(owner, _leave, place)


def _leave(place: Path) -> None:
    descriptor, users = _held.pop(place)
    if users > 1:
        _held[place] = (descriptor, users - 1)
    else:
        os.close(descriptor)
