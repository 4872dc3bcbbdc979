"""Which pieces of a run are finished, and what came of each: lines of a file, or an object a piece.

A line is appended and synced when its piece is finished; of one that was being written when a process was
stopped nothing counts. Where nothing can be appended (object storage) every piece has an object, which is
there as a whole or not at all. Each entry carries its own checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote, unquote

from preimage.errors import RunFolderError, UnwritableError, first_line
from preimage.storage.files import sha256_document, write_bytes, write_json
from preimage.storage.places import CHECK, Place, everything_in, is_remote, remove_all

LINES, OBJECTS = "items.jsonl", "items"


@runtime_checkable
class Ledger(Protocol):
    """Finished pieces by their keys."""

    def read(self) -> dict[str, Any]:
        """Everything that is finished."""

    def add(self, key: str, item: Any) -> None:
        """A piece is finished; it is kept on return."""

    def order(self, keys: Iterable[str]) -> None:
        """Put entries into this order where they have one: whoever finished first, the file is the same."""

    def clear(self) -> None:
        """Nothing is finished."""


def ledger_in(folder: Place) -> Ledger:
    """The ledger of a run's folder."""
    return ObjectLedger(folder / OBJECTS) if is_remote(folder) else LineLedger(folder / LINES)


def look_at(folder: Place) -> dict[str, Any]:
    """What is finished in a run's folder, which may be somebody's who is at work: nothing is mended."""
    return ObjectLedger(folder / OBJECTS).read() if is_remote(folder) else LineLedger(folder / LINES).look()


class LineLedger:
    """A line a piece."""

    def __init__(self, path: Place) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """Everything that is finished; half a line at the end is removed."""
        lines = self._lines()
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):  # the line being written when the run was stopped
            write_bytes(self._path, b"".join(whole))
        return dict(_entry(line, self._path) for line in whole)

    def look(self) -> dict[str, Any]:
        """Everything that is finished, the file left as it is."""
        return dict(_entry(line, self._path) for line in self._lines() if line.endswith(b"\n"))

    def _lines(self) -> list[bytes]:
        return self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []

    def add(self, key: str, item: Any) -> None:
        """Append a line, and have it on the disk."""
        append(self._path, _document(key, item))

    def order(self, keys: Iterable[str]) -> None:
        """Rewrite the file where its lines are in another order."""
        there = self.read()
        wanted = {key: there[key] for key in keys if key in there}
        if list(wanted) != list(there):
            lines = [_line(_document(key, item)) for key, item in (wanted | there).items()]
            write_bytes(self._path, "".join(lines).encode())

    def clear(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class ObjectLedger:
    """An object a piece, named by its key."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder

    def read(self) -> dict[str, Any]:
        """Everything that is finished."""
        entries = {}
        try:
            there = everything_in(self._folder)
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise RunFolderError(f"{self._folder} cannot be read: {reason}.", CHECK) from error
        for name, content in there.items():
            key, item = _entry(content, self._folder / name)
            if unquote(name.removesuffix(".json")) != key:
                raise _damaged(self._folder / name, "it is named for another piece")
            entries[key] = item
        return entries

    def add(self, key: str, item: Any) -> None:
        """Put the object of a piece."""
        write_json(self._folder / f"{quote(key, safe='')}.json", _document(key, item))

    def order(self, keys: Iterable[str]) -> None:
        """Objects have none."""

    def clear(self) -> None:
        """Remove all objects."""
        remove_all(self._folder)


def append(path: Place, entry: dict[str, Any]) -> None:
    """Append a line of json to a file on a disk, and have it there."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UnwritableError(
            f"{path} cannot be written: {error.strerror}.",
            "Make room and rerun the same command: it continues.",
        ) from error


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _document(key: str, item: Any) -> dict[str, Any]:
    return {"key": key, "item": item, "sha256": sha256_document([key, item])}


def _entry(raw: bytes, place: Place) -> tuple[str, Any]:
    """Key and item of an entry; damaged ones are refused by the file they are in."""
    try:
        entry = json.loads(raw)
        key, item, digest = entry["key"], entry["item"], entry["sha256"]
        if not isinstance(key, str) or digest != sha256_document([key, item]):
            raise ValueError("an entry fails its checksum")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"an entry has no {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
        raise _damaged(place, reason) from error
    return key, item


def _damaged(place: Place, reason: str) -> RunFolderError:
    return RunFolderError(f"{place} is damaged: {reason}.", "Give another folder.")
