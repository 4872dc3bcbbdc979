"""safetensors files written in pieces, and read back with bounded memory.

The format is an 8-byte header length, a json header and the bytes; shapes are known before the first pass,
so a file can be laid out at once and filled batch by batch, which the safetensors package itself cannot do.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from preimage.errors import StatesError, first_line

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_UNREADABLE = (SafetensorError, RuntimeError)  # numbers of a type that torch does not have, or packs in bytes


class TensorFileWriter:
    """Lays out a safetensors file and fills it in any order; reopening one continues it."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        header, self._starts, size = _lay_out(shapes, dtype)
        self._row_bytes = {name: dtype.itemsize * math.prod(shape[1:]) for name, shape in shapes.items()}
        fresh = not path.exists()
        self._file: BinaryIO = path.open("w+b" if fresh else "r+b")
        if fresh:
            try:
                self._file.write(header)
                self._file.truncate(size)
            except OSError:
                self._file.close()
                path.unlink()
                raise

    def write(self, name: str, row: int, tensor: Tensor) -> None:
        """Put rows of a tensor at their place, starting at ``row``."""
        self._file.seek(self._starts[name] + row * self._row_bytes[name])
        self._file.write(tensor_bytes(tensor))

    def sync(self) -> None:
        """Have everything written so far on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        try:
            self.sync()
        finally:
            self._file.close()


class TensorFileReader:
    """Named tensors of a safetensors file, read row by row. Damaged and hostile files are refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
            slices = {
                name: self._file.get_slice(name)
                for name in self._file.keys()  # noqa: SIM118  # not a mapping
            }
            self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            self.dtypes = {name: _TYPES.get(part.get_dtype()) for name, part in slices.items()}
            if any(
                size >= 2**63 for shape in self.shapes.values() for size in shape
            ):  # of nothing, beside a 0
                raise ValueError("it has a shape that no tensor has")
        except (SafetensorError, OSError, ValueError) as error:
            raise self._unreadable(error) from error

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, and no others, in memory."""
        try:
            part: Tensor = self._file.get_slice(name)[start:stop]
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        return part

    def number(self, name: str) -> Tensor:
        """A tensor without axes."""
        try:
            one: Tensor = self._file.get_tensor(name)
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        return one

    def _unreadable(self, error: Exception) -> StatesError:
        return StatesError(
            f"{self._path} cannot be read as safetensors: {first_line(error).rstrip('.')}.",
            "The file is damaged or not safetensors; make it again.",
        )


def file_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """Size of the whole file a :class:`TensorFileWriter` lays out."""
    return _lay_out(shapes, dtype)[2]


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, about: Mapping[str, str]) -> bytes:
    """What stands before the bytes of tensors that follow one another in this order."""
    return _lay_out(shapes, dtype, about)[0]


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors in memory."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def unpack(content: bytes) -> dict[str, Tensor]:
    """The inverse of :func:`pack`."""
    return load(content)


def _lay_out(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, about: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The header with its length, where in the file each tensor starts, and where the last one ends."""
    entries: dict[str, object] = {} if about is None else {"__metadata__": dict(about)}
    starts: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        starts[name], end = end, end + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    base = 8 + len(encoded)
    header = len(encoded).to_bytes(8, "little") + encoded
    return header, {name: base + start for name, start in starts.items()}, base + end


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw little-endian bytes of a tensor of any type, bfloat16 included."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
