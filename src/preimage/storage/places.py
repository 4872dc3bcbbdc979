"""Where files are: on a disk, or in object storage at an address: s3://bucket/run (extra ``remote``).

Whatever goes wrong at an address is an OSError here, as on a disk: every file system has errors of its own.
Listings are never taken from a file system's memory, as others write there too.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from preimage.errors import MissingExtraError, OptionError, RunFolderError, UnwritableError, first_line

# A path on a disk, or universal_pathlib's path of an address, which has the same methods.
if TYPE_CHECKING:
    Place: TypeAlias = Path
else:
    Place = Any

# Storage in which an object appears whole when its upload has ended. Elsewhere a file is renamed then, and
# where that would be a copy the place is refused.
_WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"})
_ON_DISK = ("", "file", "local")
_PATTERN = frozenset("*?[]")  # which file systems take for many files, or for a version
CHECK = "Check the address, the credentials and the network; the same command continues a run."


def place_of(given: str | os.PathLike[str] | Place) -> Place:
    """A path from what a user gives; an address needs fsspec's file system for it."""
    if isinstance(given, Path):
        return given
    if is_remote(given):
        return Path(given.path) if given.protocol in _ON_DISK else _checked(given, str(given))  # type: ignore[union-attr]
    text = os.fspath(given)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if scheme in _ON_DISK:
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
    except Exception as error:  # an unknown scheme, or settings that a file system cannot use
        raise RunFolderError(
            f"{text} is no place: {first_line(error)}.",
            "Give a folder, or an address such as s3://bucket/run.",
        ) from error
    return _checked(place, text)


def _checked(place: Any, text: str) -> Place:
    """An address at which a run can be; others are refused before anything is asked there."""
    reason, (system, target) = "", _of(place)
    if "::" in text or not (_appears_whole(system) or _renames(system)):
        reason = "what is written there would be seen before it is whole"
    elif not target.strip("/") or text.partition("://")[2].startswith("/"):
        reason = "it names no bucket"
    elif _PATTERN & set(text):
        reason = "it has one of the characters * ? [ ]"
    if reason:
        raise RunFolderError(
            f"{text} cannot hold a run: {reason}.", "Give a folder, or an address such as s3://bucket/run."
        )
    checked: Place = place
    return checked


def is_remote(place: object) -> bool:
    """Whether a place is an address, and not a path on a disk."""
    return hasattr(place, "fs") and not isinstance(place, Path)


def on_a_disk(given: str | os.PathLike[str] | Place, what: str) -> Path:
    """A path from what a user gives, where an address will not do; ``what`` is kept there."""
    text = str(given)
    if is_remote(given) or ("://" in text and text.partition("://")[0] not in _ON_DISK):
        raise OptionError(f"{text} is an address; {what} is on a disk.", "Give a folder.")
    return place_of(given)


def address(place: Place) -> str:
    """What another process finds the same place by."""
    if not is_remote(place):
        return str(place.resolve())
    if "memory" in _protocols(place.fs):  # type: ignore[attr-defined]
        raise OptionError(
            f"{place} is the memory of this process, which workers do not see.",
            "Give a folder or an address.",
        )
    return str(place)


def kind_of(place: Place) -> str | None:
    """``file`` or ``directory``; None where there is nothing."""
    if not is_remote(place):
        return None if not place.exists() else "directory" if place.is_dir() else "file"
    system, target = _of(place)
    try:
        with _as_on_a_disk():
            system.invalidate_cache()
            return str(system.info(target)["type"])
    except FileNotFoundError:
        return None


def exists(place: Place) -> bool:
    """Whether there is anything at a place."""
    return kind_of(place) is not None


def names_in(place: Place) -> list[str]:
    """What is directly in a folder, none where there is no folder."""
    if not is_remote(place):
        return sorted(path.name for path in place.iterdir()) if place.exists() else []
    return sorted(_listed(place))


def read_bytes(place: Place) -> bytes:
    """A file as a whole."""
    return read_range(place, 0, None)


def read_range(place: Place, start: int, stop: int | None) -> bytes:
    """Bytes start..stop of a file, None: its end; an OSError where it is not there or shorter."""
    if not is_remote(place):
        with place.open("rb") as file:
            file.seek(start)
            content = file.read() if stop is None else file.read(stop - start)
    elif start == stop:
        return b""
    else:
        system, target = _of(place)
        with _as_on_a_disk():
            whole = start == 0 and stop is None  # of an empty object no range can be had
            part = {} if whole else {"start": start, "end": stop}
            content = bytes(system.cat_file(target, **part))
    if stop is not None and len(content) != stop - start:
        raise OSError(f"it ends after {start + len(content)} bytes")
    return content


def everything_in(place: Place) -> dict[str, bytes]:
    """The content of every file directly in a folder at an address, by its name."""
    listed = {name: path for name, (kind, path) in _listed(place).items() if kind == "file"}
    with _as_on_a_disk():
        contents = place.fs.cat_ranges(list(listed.values()), None, None, on_error="raise")  # type: ignore[attr-defined]
    return {name: bytes(content) for name, content in zip(listed, contents, strict=True)}


def put(place: Place, content: bytes) -> None:
    """Write a file at an address; nobody sees half of it there."""
    system, _ = _of(place)
    _replace(place, lambda target: system.pipe_file(target, content))


@contextmanager
def uploading(place: Place) -> Iterator[Path]:
    """A local file that is put to an address once it is written; nobody sees half of it there."""
    with tempfile.TemporaryDirectory(prefix="preimage-") as folder:
        local = Path(folder) / place.name
        yield local
        system, _ = _of(place)
        _replace(place, lambda target: system.put_file(str(local), target))


def create(place: Place, content: bytes) -> bool:
    """Put a small object where there is none; False where there is one. For addresses alone.

    Storage that does not know how to do that at once may let two succeed at the same moment.
    """
    system, target = _of(place)
    try:
        with _as_on_a_disk():
            _make_parent(system, target)
            try:
                system.pipe_file(target, content, mode="create")
            except (NotImplementedError, TypeError, ValueError):
                if exists(place):
                    return False
                system.pipe_file(target, content)
    except FileExistsError:
        return False
    except OSError as error:
        raise unwritable(place, error) from error
    return True


def remove_all(place: Place) -> None:
    """Remove a file, or a folder with all that is in it, where there is one."""
    if not is_remote(place):
        if place.is_file():
            place.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        return
    system, target = _of(place)
    try:
        with _as_on_a_disk():
            system.invalidate_cache()
            system.rm(target, recursive=True)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise unwritable(place, error) from error


def unwritable(place: Place, error: OSError) -> UnwritableError:
    """What is said of an address at which nothing can be written."""
    return UnwritableError(f"{place} cannot be written: {error.strerror or first_line(error)}.", CHECK)


def _replace(place: Place, write: Any) -> None:
    """Have a file written at an address, under a name of its own first where it would be seen growing."""
    system, target = _of(place)
    try:
        with _as_on_a_disk():
            if _appears_whole(system):
                write(target)
                return
            _make_parent(system, target)
            partial = f"{target}.{uuid.uuid4().hex[:12]}.partial"
            write(partial)
            system.mv(partial, target)
    except OSError as error:
        raise unwritable(place, error) from error


@contextmanager
def _as_on_a_disk() -> Iterator[None]:
    """Errors of any file system as OSErrors, with words of their own where theirs are a path.

    Theirs go without their traceback: fsspec keeps an error in a frame of that very traceback, and with it
    would keep alive everybody who called, also whoever holds a run.
    """
    try:
        yield
    except FileNotFoundError as error:
        reason = "No such object or bucket"
        raise FileNotFoundError(errno.ENOENT, reason) from error.with_traceback(None)
    except FileExistsError as error:
        raise FileExistsError(first_line(error)) from error.with_traceback(None)
    except Exception as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OSError(reason.rstrip(".")) from error.with_traceback(None)


def _listed(place: Place) -> dict[str, tuple[str, str]]:
    """Kind and path of everything directly in a folder at an address, by name."""
    system, target = _of(place)
    try:
        with _as_on_a_disk():
            system.invalidate_cache()
            entries = system.ls(target, detail=True)
    except FileNotFoundError:
        return {}
    paths = [(str(one["name"]), str(one["type"])) for one in entries]
    inside = [(path, kind) for path, kind in paths if path.strip("/") != target.strip("/")]  # not the folder
    return {path.rstrip("/").rpartition("/")[2]: (kind, path) for path, kind in sorted(inside)}


def _make_parent(system: Any, target: str) -> None:
    if not _appears_whole(system):
        system.makedirs(target.rpartition("/")[0], exist_ok=True)


def _protocols(system: Any) -> tuple[str, ...]:
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


def _appears_whole(system: Any) -> bool:
    return not _WHOLE_OBJECTS.isdisjoint(_protocols(system))


def _renames(system: Any) -> bool:
    """Whether a file system has a rename of its own; fsspec's is a copy."""
    from fsspec import AbstractFileSystem

    return getattr(type(system), "mv", None) is not AbstractFileSystem.mv


def _of(place: Place) -> tuple[Any, str]:
    """The file system of an address, and its path there."""
    return place.fs, place.path  # type: ignore[attr-defined]
