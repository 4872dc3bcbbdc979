"""Named tensors of files in the field's own formats: their shapes are known before any of them is read.

A file is opened anew whenever tensors of it are read, and only the last one stays open: a folder may have
thousands, each larger than the memory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from preimage.errors import StatesError, first_line, shown
from preimage.states.caches import is_cache
from preimage.states.scales import multiplied, scale_of, zero_of
from preimage.states.tensor_input import npz_headers, open_npz, open_torch
from preimage.storage.tensor_file import TensorFileReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PICKLES = (".pkl", ".pickle", ".dill", ".joblib")
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_LONGEST_HEADER = 1 << 24  # bytes; that of a model of a thousand layers has less
_MOST_TENSORS = 100_000  # in a file: a name takes memory, however little it takes in the file
_LONGEST_NAME = 300  # characters
_LARGEST_OLD = 1 << 30  # bytes; torch's old format can only be read whole
_MOST_TEXT = 1 << 24  # bytes of an array of text
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return int(np.prod(self.shape, dtype=object))

    @property
    def floats(self) -> bool:
        """Whether it has the numbers that states are made of."""
        return self.dtype.is_floating_point

    @property
    def whole(self) -> bool:
        """Whether it has whole numbers, as token ids are."""
        return not (self.floats or self.dtype.is_complex or self.dtype == torch.bool)


@dataclass(frozen=True)
class Source:
    """What a file holds: tensors by name (an array alone has the file's), and what stands beside them.

    ``about``: text and plain values beside the tensors. ``unread``: names of what was not understood.
    """

    path: Path
    kind: str  # safetensors, npy, npz, torch
    entries: Mapping[str, Entry]
    about: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def is_coded(self, name: str) -> bool:
        """Whether a tensor has codes of 8 bits, whose scales are there too."""
        entry = self.entries[name]
        known = entry.dtype.itemsize == 1 and (entry.whole or entry.floats)
        return known and len(entry.shape) > 0 and scale_of(name, self.entries) is not None

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor's first axis, as they are stored."""
        return self._read(name, slice(start, stop))

    def states(self, name: str, start: int, stop: int) -> Tensor:
        """The same as numbers: codes are multiplied by their scales, for which all of both is read."""
        if not self.is_coded(name):
            return self.rows(name, start, stop)
        beside = [scale_of(name, self.entries), zero_of(name, self.entries)]
        parts = [None if one is None else self.all(one) for one in beside]
        return multiplied(self.all(name), *parts)[start:stop]  # type: ignore[arg-type]  # a scale is there

    def all(self, name: str) -> Tensor:
        """A tensor, all of it, as it is stored."""
        return self._read(name, None)

    def _read(self, name: str, part: slice | None) -> Tensor:
        opened = _again(self.path)
        if opened is None or opened.source.entries.get(name) != self.entries[name]:
            raise StatesError(f"{shown(self.path.name)} has changed since it was opened.", "Open it again.")
        return opened.get(name, part)


class _Opened(NamedTuple):
    source: Source
    get: Callable[[str, slice | None], Tensor]  # rows of a tensor, or all of it


def open_source(path: Path) -> Source | None:
    """The tensors of a file, known by its first bytes; None where it is in no such format."""
    _open.cache_clear()
    opened = _again(path)
    if opened is None:
        return None
    names = opened.source.entries
    if len(names) > _MOST_TENSORS or max(map(len, names), default=0) > _LONGEST_NAME:
        raise StatesError(
            f"{shown(path.name)} has {len(names):,} tensors, or some with endless names.",
            f"Save up to {_MOST_TENSORS:,} in a file, with names of up to {_LONGEST_NAME} characters.",
        )
    return opened.source


def last_part(name: str) -> str:
    """The part of a dotted name that says what it is."""
    return name.replace("/", ".").rsplit(".", 1)[-1].lower()


def _again(path: Path) -> _Opened | None:
    """The file as it is now."""
    try:
        known = path.stat()
        return _open(path, (known.st_ino, known.st_size, known.st_mtime_ns))
    except OSError as error:
        raise StatesError(
            f"{shown(path.name)} cannot be read: {error.strerror}.", "Check the file."
        ) from error


@lru_cache(maxsize=1)
def _open(path: Path, stamp: tuple[int, int, int]) -> _Opened | None:
    """A file of tensors; ``stamp``: tells it from what it is after a change."""
    with path.open("rb") as file:
        start = file.read(16)
    suffix, size = path.suffix.lower(), stamp[1]
    if start.startswith(b"\x93NUMPY") or suffix == ".npy":
        return _npy(path)
    header = int.from_bytes(start[:8], "little")
    if suffix == ".safetensors" or (
        start[8:9] == b"{" and 2 <= header <= size - 8 and suffix not in _PICKLES
    ):
        return _safetensors(path, header)
    if start.startswith(b"PK") or suffix == ".npz":
        names = _zipped(path)
        if suffix == ".npz" or (names and all(name.endswith(".npy") for name in names)):
            return _npz(path)
        if suffix in _TORCH or any(name.endswith("/data.pkl") for name in names):
            return _torch(path, size)
    if suffix in _PICKLES or (
        suffix in _TORCH and start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"
    ):
        return _torch(path, size)
    return None


def _zipped(path: Path) -> list[str]:
    """What is in a zip archive; nothing where it is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except Exception:  # whatever a stranger's archive makes its readers stumble over
        return []


def _safetensors(path: Path, header: int) -> _Opened:
    if header > _LONGEST_HEADER:
        raise StatesError(
            f"{shown(path.name)} claims a header of {header:,} bytes.",
            f"It is damaged, or not safetensors; headers of up to {_LONGEST_HEADER:,} are read.",
        )
    reader = TensorFileReader(path)  # which refuses what is damaged
    entries, unread = {}, []
    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata() or {})
        for name, shape in reader.shapes.items():
            dtype = _TYPES.get(file.get_slice(name).get_dtype())
            if dtype is None:
                unread.append(name)
            else:
                entries[name] = Entry(shape, dtype)

    def get(name: str, part: slice | None) -> Tensor:
        if not entries[name].shape:
            return reader.number(name)
        first, last, _ = (part or slice(None)).indices(entries[name].shape[0])
        return reader.rows(name, first, last)

    return _Opened(Source(path, "safetensors", entries, about, tuple(unread)), get)


def _npy(path: Path) -> _Opened:
    try:
        with np.errstate(over="raise"):  # a shape the file cannot hold fails here, before any memory
            array = np.lib.format.open_memmap(path, mode="r")
        dtype = _own(array[:0] if array.ndim else array).dtype
    except Exception as error:  # headers are Python's literals, and its parser stumbles in many ways
        raise StatesError(
            f"{shown(path.name)} cannot be read as a plain array: {first_line(error).rstrip('.')}.",
            "Save it with numpy.save as floats.",
        ) from error
    entries = {path.stem: Entry(tuple(array.shape), dtype)}
    return _Opened(Source(path, "npy", entries), lambda _, part: _own(array if part is None else array[part]))


def _own(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _npz(path: Path) -> _Opened:
    held = open_npz(path)
    entries: dict[str, Entry] = {}
    texts: list[str] = []
    unread: list[str] = []
    size = 0
    for name, header in npz_headers(path).items():
        if header is not None and header[1].kind == "U":
            size += int(np.prod(header[0], dtype=object)) * header[1].itemsize
            (texts if size <= _MOST_TEXT else unread).append(name)
            continue
        try:
            if header is None:
                raise TypeError
            entries[name] = Entry(header[0], _own(np.empty(0, header[1])).dtype)
        except (TypeError, ValueError):  # of a type that torch does not have
            unread.append(name)
    last = lru_cache(maxsize=1)(held.get)  # prompts of an archive's array are read one after another

    def get(name: str, part: slice | None) -> Tensor:
        tensor = last(name)
        assert isinstance(tensor, Tensor)  # an archive has nothing else
        return tensor if part is None else tensor[part].clone()

    return _Opened(Source(path, "npz", entries, _texts(path, texts), tuple(unread)), get)


def _texts(path: Path, names: list[str]) -> dict[str, list[str]]:
    """Arrays of text in an archive, as far as they can be read."""
    found = {}
    with suppress(Exception), np.load(path, allow_pickle=False) as arrays:  # a stranger's archive
        for name in names:
            found[name] = [str(one) for one in np.ravel(arrays[name])]
    return found


def _torch(path: Path, size: int) -> _Opened:
    """What ``torch.save`` wrote of plain tensors; files with objects in them are not opened."""
    refused = StatesError(
        f"{shown(path.name)} is a pickle that may hold more than plain tensors; it was not opened.",
        "Such dumps often have token ids beside the states: save its tensors with safetensors where it was "
        "made.",
    )
    if path.suffix.lower() in _PICKLES:
        raise refused
    if size > _LARGEST_OLD and not zipfile.is_zipfile(path):
        raise StatesError(
            f"{shown(path.name)} is in torch's old format, and too large to be read whole.", "Save it anew."
        )
    try:
        held = open_torch(path)
    except StatesError as error:
        if "cannot be read as plain tensors" in error.message:
            raise refused from error
        raise
    tensors: dict[str, Tensor] = {}
    about: Mapping[str, Any] = {}
    unread = []
    if isinstance(held, Tensor):
        tensors[path.stem] = held
    elif isinstance(held, list):
        tensors = _named("", held)
    else:
        about = held.others
        for name in held.names:
            try:
                found = held.get(name)
            except StatesError:
                if not _is_plain(about.get(name)):
                    unread.append(name)
                continue
            listed = {name: found} if isinstance(found, Tensor) else _named(name, found)
            tensors |= listed
            unread += [] if listed else [name]
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    source = Source(path, "torch", entries, about, tuple(unread))
    return _Opened(source, lambda name, part: tensors[name] if part is None else tensors[name][part].clone())


def _is_plain(value: object) -> bool:
    """Whether a list is of text or whole numbers, which are looked at elsewhere."""
    return isinstance(value, list | tuple) and all(isinstance(one, str | int) for one in value)


def _named(name: str, held: list[Any]) -> dict[str, Tensor]:
    """A list of tensors by names: ``k.2`` of a cache's keys, ``k[2]`` of others, which say no layer."""
    if is_cache(held):
        name = name or "past_key_values"
        halves = [("key", pair[0]) for pair in held], [("value", pair[1]) for pair in held]
        return {f"{name}.{block}.{half}": one for part in halves for block, (half, one) in enumerate(part)}
    if not all(isinstance(one, Tensor) for one in held):
        return {}
    if all(one.ndim == 4 for one in held):
        return {f"{name}.{block}": one for block, one in enumerate(held)}
    return {f"{name}[{number}]": one for number, one in enumerate(held)}
