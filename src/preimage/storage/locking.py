"""One process at a time in a run folder; the lock goes with the process, however that ends.

A folder on a disk is locked by the system. At an address there is no such lock: whoever works there puts a
sign up and changes it every few seconds. A sign that does not change while one looks at it is a dead
process's. Signs are numbered, and the greatest number counts: who takes a folder over creates the next one,
which storage lets only one process do, and nobody ever changes the sign of another. Who finds that its own
number is no longer the greatest stops. No clock and no date is read, only time that passes here.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from preimage.errors import RunFolderError, first_line
from preimage.storage.places import CHECK, Place, create, everything_in, is_remote, names_in, put, remove_all

SIGNS = "driver"  # the folder of signs inside that of a run
_BEAT = 3.0  # seconds between two changes of a sign
_LOOK = 4  # beats for which one that does not change is looked at
_PATIENCE = 10.0  # seconds in which a sign must be down

_held: dict[Path, tuple[int, int]] = {}  # folder: its descriptor, and how many here have it open
_signs: dict[str, _Sign] = {}  # by the address of the folder


class Hold:
    """A folder that other processes are kept out of, as long as its owner lives or until it is left."""

    def __init__(self, leave: Callable[[], object] | None = None, sign: _Sign | None = None) -> None:
        self._leave, self._sign = leave, sign

    def leave(self) -> None:
        """Let others in. On a disk that is left to the end of the owner, which nobody has to wait for."""
        if self._leave is not None and self._sign is not None:
            self._leave()

    def require(self, *, look: bool = False) -> None:
        """Refuse to go on where another process has taken the folder over; ``look``: whether one did now."""
        if self._sign is not None:
            self._sign.require(look)


def hold(folder: Place, owner: object) -> Hold:
    """Keep other processes out of ``folder`` as long as ``owner`` lives; this one may enter again.

    Where folders cannot be locked (some network disks, no POSIX) nobody is kept out. At an address, whoever
    holds a folder holds all folders in it.
    """
    if is_remote(folder):
        name, around = str(folder), [_signs.get(str(one)) for one in folder.parents]
        outer = next((one for one in around if one is not None and not one.lost), None)
        if outer is not None:
            return Hold(None, outer)
        sign = _signs.get(name)
        if sign is None or sign.lost:
            sign = _signs[name] = _Sign(folder)
        sign.users += 1
        return Hold(weakref.finalize(owner, _take_down, sign, name), sign)
    try:
        import fcntl
    except ImportError:
        return Hold()
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
            return Hold()
    _held[place] = (descriptor, users + 1)
    return Hold(weakref.finalize(owner, _leave, place))


def _leave(place: Path) -> None:
    descriptor, users = _held.pop(place)
    if users > 1:
        _held[place] = (descriptor, users - 1)
    else:
        os.close(descriptor)


def _take_down(sign: _Sign, name: str) -> None:
    sign.users -= 1
    if sign.users == 0:
        if _signs.get(name) is sign:
            del _signs[name]
        sign.take_down()


def _occupied(folder: Place) -> RunFolderError:
    return RunFolderError(
        f"Another process is working in {folder}.", "Wait until it is done, or give another folder."
    )


class _Sign:
    """This process's sign in a folder at an address, kept moving by a thread of its own."""

    def __init__(self, folder: Place) -> None:
        self.users, self.lost = 0, False
        self._folder, self._holder, self._beats = folder, uuid.uuid4().hex, 0
        self._down = threading.Event()
        self._number = self._free_number()
        self._place = folder / SIGNS / f"{self._number}.json"
        if not self._claim():
            raise _occupied(folder)
        for name in self._others():  # of the dead
            with suppress(RunFolderError):
                remove_all(folder / SIGNS / name)
        self._thread = threading.Thread(target=self._beat, daemon=True, name="preimage-sign")
        self._thread.start()

    def take_down(self) -> None:
        """Nobody works here any more. The thread does it, so that no beat comes after.

        Only the main thread waits for it: any other may be the one that it needs to get through.
        """
        self._down.set()
        if threading.current_thread() is threading.main_thread():
            self._thread.join(_PATIENCE)

    def require(self, look: bool) -> None:
        """Refuse to go on without the folder."""
        if look and not self.lost:
            self.lost = self._newest()[0] != self._number
        if self.lost:
            raise RunFolderError(
                f"Another process has taken {self._folder} over: this one was not heard of for a while.",
                "Let that one finish, or stop it and rerun the command: it continues.",
            )

    def _free_number(self) -> int:
        """The number of the next sign, once it is certain that nobody keeps the last one moving."""
        first = self._newest()
        until = time.monotonic() + _LOOK * _BEAT
        while first[0] >= 0:
            time.sleep(_BEAT / 3)
            now = self._newest()
            if now[0] < 0:
                break
            if now != first:
                raise _occupied(self._folder)
            if time.monotonic() >= until:
                return first[0] + 1
        return 0

    def _claim(self) -> bool:
        """Whether the sign is up, and nobody else's."""
        content = self._content()
        if not create(self._place, content):
            return False
        if create(self._place, content):  # storage that cannot refuse: the last one to write has it
            time.sleep(min(1.0, _BEAT))
            return self._newest() == (self._number, content)
        return True

    def _beat(self) -> None:
        while not self._down.wait(_BEAT):
            with suppress(Exception):  # one that is late is taken for dead only after several
                if self._newest()[0] != self._number:
                    self.lost = True
                    break
                self._beats += 1
                put(self._place, self._content())
        with suppress(Exception):  # whatever storage says: a sign that stays stands still
            remove_all(self._place)

    def _content(self) -> bytes:
        return json.dumps({"holder": self._holder, "beats": self._beats}).encode()

    def _others(self) -> list[str]:
        with suppress(OSError):
            return [name for name in names_in(self._folder / SIGNS) if name != self._place.name]
        return []

    def _newest(self) -> tuple[int, bytes]:
        """Number and content of the sign that counts; -1 where there is none."""
        try:
            signs = everything_in(self._folder / SIGNS)
        except FileNotFoundError:  # one was taken down in this moment
            return self._newest()
        except OSError as error:
            raise RunFolderError(
                f"{self._folder} cannot be read: {error.strerror or first_line(error)}.", CHECK
            ) from error
        numbered = {int(name.removesuffix(".json")): content for name, content in signs.items()
                    if name.removesuffix(".json").isdecimal()}  # fmt: skip
        return max(numbered.items(), default=(-1, b""))
