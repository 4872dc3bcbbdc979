"""Where files are: on a disk, or in object storage at an address: s3://bucket/run (extra ``remote``)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from preimage.errors import MissingExtraError, RunFolderError, UnwritableError, first_line

# A path on a disk, or universal_pathlib's path of an address, which has the same methods.
if TYPE_CHECKING:
    Place: TypeAlias = Path
else:
    Place = Any

# Storage in which an object appears whole when its upload has ended; elsewhere it is renamed then.
_WHOLE_OBJECTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oci", "oss", "r2", "memory"}


def place_of(given: str | os.PathLike[str] | Place) -> Place:
    """A path from what a user gives; an address needs fsspec's file system for it."""
    if isinstance(given, Path) or is_remote(given):
        return given  # type: ignore[return-value]  # as it is
    text = os.fspath(given)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if scheme in ("file", "local"):
        return Path(rest)
    try:
        from upath import UPath

        place: Any = UPath(text)
        _ = place.fs  # which imports what the scheme needs
    except ImportError as error:
        raise MissingExtraError(
            f"{text} needs a package that is not installed: {first_line(error)}.",
            f"pip install 'preimage[remote]', and fsspec's file system for {scheme}.",
        ) from error
    except ValueError as error:
        raise RunFolderError(f"{text} is no place: {first_line(error)}.", "Give a folder.") from error
    found: Place = place
    return found


def is_remote(place: object) -> bool:
    """Whether a place is an address, and not a path on a disk."""
    return hasattr(place, "fs") and not isinstance(place, Path)


def address(place: Place) -> str:
    """What another process finds the same place by."""
    return str(place) if is_remote(place) else str(place.resolve())


@contextmanager
def uploading(place: Place) -> Iterator[Path]:
    """A local file that is put to an address once it is written; nobody sees half of it there."""
    with tempfile.TemporaryDirectory(prefix="preimage-") as folder:
        local = Path(folder) / place.name
        yield local
        system, target = _of(place)
        whole = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
        try:
            if whole in _WHOLE_OBJECTS:
                system.put_file(str(local), target)
            else:
                system.makedirs(system._parent(target), exist_ok=True)
                partial = f"{target}.{os.urandom(4).hex()}.partial"
                system.put_file(str(local), partial)
                system.mv(partial, target)
        except Exception as error:  # every file system has errors of its own
            raise UnwritableError(
                f"{place} cannot be written: {first_line(error)}.",
                "Check the address and the credentials; the same command continues a run.",
            ) from error


def read_range(place: Place, start: int, stop: int | None) -> bytes:
    """Bytes start..stop of a file, None: its end; an OSError where it is not there or shorter."""
    if is_remote(place):
        system, target = _of(place)
        content = bytes(system.cat_file(target, start=start, end=stop))
    else:
        with place.open("rb") as file:
            file.seek(start)
            content = file.read() if stop is None else file.read(stop - start)
    if stop is not None and len(content) != stop - start:
        raise OSError(f"it ends after {start + len(content)} bytes")
    return content


def create(place: Place, content: bytes) -> bool:
    """Put a small object where there is none; False where there is one. For addresses alone."""
    system, target = _of(place)
    try:
        try:
            system.pipe_file(target, content, mode="create")
        except (NotImplementedError, TypeError):  # storage that cannot look and write at once
            if system.exists(target):
                return False
            system.pipe_file(target, content)
    except FileExistsError:
        return False
    except Exception as error:
        raise UnwritableError(
            f"{place} cannot be written: {first_line(error)}.", "Check the address and the credentials."
        ) from error
    return True


def everything_in(place: Place) -> dict[str, bytes]:
    """The content of every file directly in a folder at an address, by its name."""
    system, target = _of(place)
    system.invalidate_cache()
    try:
        names = system.ls(target, detail=False)
    except FileNotFoundError:
        return {}
    return {name.rpartition("/")[2]: bytes(system.cat_file(name)) for name in sorted(names)}


def remove_all(place: Place) -> None:
    """Remove a file, or a folder with all that is in it, where there is one."""
    if is_remote(place):
        system, target = _of(place)
        with suppress(FileNotFoundError):
            system.rm(target, recursive=True)
        return
    import shutil

    if place.is_file():
        place.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)


def _of(place: Place) -> tuple[Any, str]:
    """The file system of an address, and its path there."""
    return place.fs, place.path  # type: ignore[attr-defined]
