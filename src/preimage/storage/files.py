"""Files that are whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from preimage.errors import MissingExtraError, RunFolderError, UnwritableError, first_line
from preimage.storage.places import Place, is_remote, read_bytes, uploading

SCHEMA = "preimage/9"  # of everything that is written; a change of any format raises it
# Whose bundles and lenses are still read: in 1 one field had another name, in 2 all states were residual,
# until 3 every lens was of a layer, until 4 it did not say with which tokenizer it was trained, until 6 run
# folders had no checksums, and until 8 readings did not spell their tokens.
BEFORE = tuple(f"preimage/{number}" for number in range(1, 9))
_MOST_LEVELS = 100  # of json objects and lists in one another; what is written here has less than twenty


def parse_json(text: str | bytes) -> Any:
    """What a json text says; a ValueError where it is none, or too deep for those who walk over it next."""
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [document]
    for _ in range(_MOST_LEVELS):
        level = [part for value in level for part in _inside(value)]
        if not level:
            return document
    raise ValueError("it is nested too deeply")


def _inside(value: Any) -> Iterable[Any]:
    """The objects and lists right inside a json value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, dict | list)]


Buffer: TypeAlias = bytes | bytearray | memoryview


def plain(value: Any) -> Any:
    """The same value in what json knows; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dumps(document: dict[str, Any]) -> str:
    """One json document. Lone surrogates and control characters leave it as escapes."""
    return json.dumps(plain(document), indent=1, ensure_ascii=True, allow_nan=False)


def write_json(path: Place, document: dict[str, Any]) -> Place:
    """Write one json document."""
    return write_text(path, dumps(document))


def read_json(path: Place) -> dict[str, Any]:
    """Read one json document."""
    try:
        document = parse_json(read_bytes(path).decode())
        if not isinstance(document, dict):
            raise ValueError("it is not a json object")
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunFolderError(f"{path} cannot be read: {reason}.", "Give another folder.") from error
    return document


def write_table(path: Place, rows: list[dict[str, Any]]) -> Place:
    """Write rows of plain values as parquet."""
    import pyarrow
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return write_bytes(path, sink.getvalue().to_pybytes())


def dataframe(rows: list[dict[str, Any]]) -> Any:
    """The same rows as a DataFrame of pandas: what it would read from the parquet file."""
    import pyarrow

    try:
        import pandas  # noqa: F401  # which pyarrow takes; preimage itself does not need it
    except ImportError as error:
        raise MissingExtraError("pandas is not installed.", "pip install pandas") from error
    return pyarrow.Table.from_pylist(rows).to_pandas()


def write_text(path: Place, text: str) -> Place:
    """Write a text file."""
    return write_bytes(path, text.encode())


def write_bytes(path: Place, *content: Buffer) -> Place:
    """Write a file of bytes, of which the parts are one behind the other."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in content:
            file.write(part)
    return path


def write_tensors(path: Place, tensors: Mapping[str, Any], about: dict[str, Any] | None = None) -> Place:
    """Write tensors as safetensors, with ``about`` as json in their metadata."""
    from safetensors.torch import save_file

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(kept, temporary, None if about is None else {"about": json.dumps(about)})
    return path


@contextmanager
def replacing(path: Place) -> Iterator[Path]:
    """A temporary file, synced and renamed to ``path`` once it is written; an error leaves none behind.

    Its name is nobody else's, also where several machines write on one disk. To an address it is uploaded.
    """
    temporary: Path | None = None
    try:
        if is_remote(path):
            with uploading(path) as local:
                yield local
            return
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:  # Ctrl-C too; and safetensors has errors of its own for a full disk
        with suppress(OSError):
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = getattr(error, "strerror", None) or error
        raise UnwritableError(
            f"{path} cannot be written: {reason}.",
            "Make room or give another place; the same command continues a run.",
        ) from error


def copy_hashed(source: Path, target: Path, most: int) -> tuple[int, str]:
    """Copy a file, or its first ``most`` bytes; how many these are, and their SHA-256."""
    digest, left = hashlib.sha256(), most
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(min(1 << 20, left)):
            digest.update(chunk)
            writing.write(chunk)
            left -= len(chunk)
    return most - left, digest.hexdigest()


def sha256_document(document: Any) -> str:
    """Checksum of what json keeps of a value, whatever the order of its fields and the spaces between."""
    text = json.dumps(plain(document), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Checksum of a file, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
