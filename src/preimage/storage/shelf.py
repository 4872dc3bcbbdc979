"""Named bytes beside a run, for whoever works at it: in its folder, or wherever a cluster keeps them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable

from preimage.errors import RunFolderError
from preimage.storage.files import Buffer, write_bytes
from preimage.storage.places import Place, read_range


@runtime_checkable
class Shelf(Protocol):
    """Whole files by name, written once and read in parts."""

    def put(self, name: str, *content: Buffer) -> None:
        """Keep a file of these parts, all of it or nothing."""

    def get(self, name: str, start: int, stop: int | None) -> bytes:
        """Bytes start..stop of a file, None: its end; a RunFolderError where there are none."""


class FolderShelf:
    """A shelf in a folder that this process can reach."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder

    def put(self, name: str, *content: Buffer) -> None:
        """Write a file."""
        write_bytes(self._path(name), *content)

    def get(self, name: str, start: int, stop: int | None) -> bytes:
        """Read a part of one."""
        try:
            return read_range(self._path(name), start, stop)
        except OSError as error:
            reason = getattr(error, "strerror", None) or error
            raise RunFolderError(
                f"{self.folder / name} cannot be read: {reason}.", "Rerun the command in another folder."
            ) from error

    def _path(self, name: str) -> Place:
        parts = PurePosixPath(name).parts
        if (
            not parts or name.startswith("/") or ".." in parts or "\x00" in name
        ):  # a peer may ask for anything
            raise RunFolderError(f"{name[:60]!r} is no name on a shelf.", "Give one inside the run's folder.")
        return self.folder.joinpath(*parts)
