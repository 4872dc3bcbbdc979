"""The content of a safetensors checkpoint, hashed without torch.

Loading a model to find out that it is the wrong one takes seconds; hashing its files takes a moment. The hash
is over the tensors, not the files: sharding and metadata do not change it.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_MAX_HEADER = 100 * 2**20  # the format's own limit


def checkpoint_hash(folder: Path) -> str | None:
    """SHA-256 over names, types, shapes and bytes of all tensors; None where there is no such checkpoint."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    try:
        entries = sorted(entry for path in files for entry in _entries(path))
        with ThreadPoolExecutor() as pool:  # hashlib lets go of the interpreter lock
            digests = list(pool.map(_digest, entries))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # damaged: loading will say so properly
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _entries(path: Path) -> list[tuple[str, str, str, int, int]]:
    """(name, type and shape, file, start, end) of every tensor of a file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise ValueError("the header is too large")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found = []
    for name, about in header.items():
        start, end = (8 + size + offset for offset in about["data_offsets"])
        found.append((name, f"{about['dtype']} {about['shape']}", str(path), start, end))
    return found


def _digest(entry: tuple[str, str, str, int, int]) -> bytes:
    name, about, path, start, end = entry
    digest = hashlib.sha256(f"{name} {about}".encode())
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (chunk := file.read(min(1 << 24, end - start))):
            digest.update(chunk)
            start += len(chunk)
    return digest.digest()
