"""One process at a time in a run folder; the lock goes with the process, however that ends.

A folder on a disk is locked by the system. At an address there is no such lock: whoever works there puts a
sign up and changes it every few seconds. A sign that does not change while one looks at it is a dead
process's. No clock is read, only time that passes here.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from preimage.errors import RunFolderError, first_line
from preimage.storage.places import Place, create, is_remote

SIGN = "driver.json"
_BEAT = 3.0  # seconds between two changes of a sign
_LOOK = 4 * _BEAT  # for which one that does not change is looked at

_held: dict[Path, tuple[int, int]] = {}  # folder: its descriptor, and how many here have it open


_signs: dict[str, _Sign] = {}  # by the address of the folder


def hold(folder: Place, owner: object) -> None:
    """Keep other processes out of ``folder`` as long as ``owner`` lives; this one may enter again.

    Where folders cannot be locked (some network disks, no POSIX) nobody is kept out.
    """
    if is_remote(folder):
        name = str(folder)
        sign = _signs.get(name) or _Sign(folder)
        _signs[name] = sign
        sign.users += 1
        weakref.finalize(owner, _take_down, name)
        return
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
            raise _occupied(folder) from None
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


def _occupied(folder: Place) -> RunFolderError:
    return RunFolderError(
        f"Another process is working in {folder}.", "Wait until it is done, or give another folder."
    )


class _Sign:
    """This process's sign in a folder at an address, kept moving by a thread of its own."""

    def __init__(self, folder: Place) -> None:
        self.users = 0
        self._folder, self._place, self._holder = folder, folder / SIGN, uuid.uuid4().hex
        self._beats = 0
        self._down = threading.Event()
        if not create(self._place, self._content()):
            self._wait_for_it_to_stand_still()
            self._put()
            time.sleep(
                min(1.0, _BEAT)
            )  # whoever does the same at this moment is the last to write, or we are
            if (self._read() or {}).get("holder") != self._holder:
                raise _occupied(folder)
        threading.Thread(target=self._beat, daemon=True, name="preimage-sign").start()

    def take_down(self) -> None:
        """Nobody works here any more."""
        self._down.set()
        with suppress(Exception):  # whatever storage says: a sign that stays stands still
            if (self._read() or {}).get("holder") == self._holder:
                self._place.unlink()

    def _wait_for_it_to_stand_still(self) -> None:
        first, until = self._read(), time.monotonic() + _LOOK
        while time.monotonic() < until:
            time.sleep(_BEAT / 3)
            now = self._read()
            if now is None:
                return
            if now != first:
                raise _occupied(self._folder)

    def _beat(self) -> None:
        while not self._down.wait(_BEAT):
            with suppress(Exception):  # one that is late is taken for dead only after several
                self._beats += 1
                self._put()

    def _put(self) -> None:
        self._place.fs.pipe_file(self._place.path, self._content())  # type: ignore[attr-defined]

    def _content(self) -> bytes:
        return json.dumps({"holder": self._holder, "beats": self._beats}).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            self._place.fs.invalidate_cache()  # type: ignore[attr-defined]
            content = self._place.fs.cat_file(self._place.path)  # type: ignore[attr-defined]
            return dict(json.loads(content))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        except Exception as error:
            raise RunFolderError(
                f"{self._place} cannot be read: {first_line(error)}.",
                "Check the address and the credentials.",
            ) from error


def _take_down(name: str) -> None:
    sign = _signs[name]
    sign.users -= 1
    if sign.users == 0:
        del _signs[name]
        sign.take_down()
