"""What Ray runs: workers as actors, and the way to a folder that only the driver's machine sees."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from preimage import errors
from preimage.cluster.worker import Worker
from preimage.errors import PreimageError
from preimage.storage.files import Buffer
from preimage.storage.places import place_of
from preimage.storage.shelf import FolderShelf, Shelf

PROOF = "shelf.partial"  # a file by which a worker knows that it sees the driver's folder


class Actor(Worker):
    """A worker as Ray runs it: what is large comes by reference, once."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._shelves: dict[str, Shelf] = {}

    def run(
        self, digest: str, told: list[Any], folder: dict[str, Any], keys: list[str], inputs: bytes
    ) -> tuple[Any, ...]:
        """Some pieces of a job; ``told`` holds a reference that is followed where the job is new."""
        import ray

        if folder["address"] not in self._shelves:
            self._shelves = {folder["address"]: _shelf(folder)}
        new = digest not in self._jobs
        content = bytes(ray.get(told[0])) if new else b""
        return tuple(self.do(digest, content, self._shelves[folder["address"]], keys, inputs))


class RelayShelf:
    """The shelf of a folder that only the driver's machine sees."""

    def __init__(self, relay: Any) -> None:
        self._relay = relay

    def put(self, name: str, *content: Buffer) -> None:
        """Have it written there."""
        import ray

        _raise_told(ray.get(self._relay.put.remote(name, b"".join(content))))

    def get(self, name: str, start: int, stop: int | None) -> bytes:
        """Have it read there."""
        import ray

        found = ray.get(self._relay.get.remote(name, start, stop))
        _raise_told(found)
        return bytes(found)


class Relay:
    """Reads and writes in the driver's folder for workers that do not see it; runs beside the driver."""

    def __init__(self, folder: str) -> None:
        self._shelf = FolderShelf(place_of(folder))

    def put(self, name: str, content: bytes) -> str | None:
        """Write a file; why not, as json."""
        try:
            self._shelf.put(name, content)
        except PreimageError as error:
            return told_error(error)
        return None

    def get(self, name: str, start: int, stop: int | None) -> bytes | str:
        """Read a part of one; why not, as json."""
        try:
            return self._shelf.get(name, start, stop)
        except PreimageError as error:
            return told_error(error)


def _shelf(folder: dict[str, Any]) -> Shelf:
    """The driver's folder where this process sees it, else the way through the driver's machine."""
    with suppress(OSError, PreimageError):
        shelf = FolderShelf(place_of(folder["address"]))
        if shelf.get(PROOF, 0, None).decode() == folder["proof"]:
            return shelf
    return RelayShelf(folder["relay"])


def told_error(error: PreimageError) -> str:
    """An error as json, for whoever asked for what ended in it."""
    return json.dumps({"type": type(error).__name__, **error.to_dict()})


def _raise_told(found: object) -> None:
    if isinstance(found, str):
        raise error_of(found)


def error_of(content: bytes | str) -> PreimageError:
    """The error a worker raised, as the kind it was."""
    told = json.loads(content)
    kind = getattr(errors, str(told["type"]), None)
    made = kind if isinstance(kind, type) and issubclass(kind, PreimageError) else PreimageError
    return made(str(told["message"]), str(told["hint"]))
