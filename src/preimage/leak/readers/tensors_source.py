"""Named tensors of files in the field's own formats, whose shapes are known before any is read."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from preimage.errors import StatesError, first_line, shown
from preimage.states import tensor_input
from preimage.states.caches import is_cache
from preimage.storage.tensor_file import TensorFileReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PICKLES = (".pkl", ".pickle", ".dill", ".joblib")
_TORCH = (".pt", ".pth", ".bin", ".ckpt", *_PICKLES)
_LONGEST_HEADER = 100_000_000  # bytes, as the safetensors package has it
_WHOLE = frozenset({"U8", "I8", "I16", "I32", "I64", "U16", "U32", "U64"})


@dataclass(frozen=True)
class Named:
    """A tensor in a file: its shape, whether its numbers are whole, and what reads rows of its first axis."""

    shape: tuple[int, ...]
    whole: bool
    rows: Callable[[int, int], Tensor]

    def all(self) -> Tensor:
        """The tensor, all of it."""
        return self.rows(0, self.shape[0])


@dataclass(frozen=True)
class Source:
    """What a file holds: tensors by name (an array alone is named ""), its header, and what was not read.

    ``listed``: the keys and values of a cache, or layers of states, where the file has a plain list of them.
    """

    kind: str  # safetensors, npy, npz, torch
    tensors: Mapping[str, Named]
    about: Mapping[str, str] = field(default_factory=dict)
    listed: tuple[Any, ...] = ()
    unread: tuple[str, ...] = ()


def open_source(path: Path) -> Source | None:
    """The tensors of a file, known by its first bytes; None where it is in no such format."""
    with path.open("rb") as file:
        start = file.read(16)
    suffix, size = path.suffix.lower(), path.stat().st_size
    if start.startswith(b"\x93NUMPY") or suffix == ".npy":
        return _from_npy(path)
    header = int.from_bytes(start[:8], "little")
    if suffix == ".safetensors" or (
        start[8:9] == b"{" and header <= min(size - 8, _LONGEST_HEADER) and suffix not in _PICKLES
    ):
        return _from_safetensors(path)
    if start.startswith(b"PK") or suffix == ".npz":
        return _from_npz(path) if suffix == ".npz" or _is_npz(path) else _from_torch(path)
    if suffix in _PICKLES or (
        suffix in _TORCH and start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"
    ):
        return _from_torch(path)
    return None


def _is_npz(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
    return bool(names) and all(name.endswith(".npy") for name in names)


def _from_safetensors(path: Path) -> Source:
    reader = TensorFileReader(path)  # which refuses what is damaged
    tensors = {}
    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata() or {})
        for name, shape in reader.shapes.items():
            if shape:
                whole = file.get_slice(name).get_dtype() in _WHOLE
                tensors[name] = Named(shape, whole, partial(reader.rows, name))
    return Source("safetensors", tensors, about)


def _from_npy(path: Path) -> Source:
    try:
        with np.errstate(over="raise"):  # a shape the file cannot hold fails here, before any memory
            array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # headers are Python's literals, and its parser stumbles in many ways
        raise StatesError(
            f"{path.name} cannot be read as a plain array: {first_line(error).rstrip('.')}.",
            "Save it with numpy.save as floats.",
        ) from error
    if array.dtype.kind not in "fiu":
        raise StatesError(f"{path.name} holds {shown(str(array.dtype))}, not numbers.", "Save floats or ids.")
    one = Named(tuple(array.shape), array.dtype.kind in "iu", partial(_rows_of_array, array))
    return Source("npy", {"": one} if array.ndim else {})


def _rows_of_array(array: NDArray[Any], start: int, stop: int) -> Tensor:
    part = array[start:stop]
    return torch.from_numpy(np.array(part, dtype=array.dtype.newbyteorder("="), order="C"))


def _from_npz(path: Path) -> Source:
    held = tensor_input._from_npz(path)
    tensors = {}
    for name in held.names:
        tensor = held.get(name)  # one at a time, for its shape: npz has no index of them
        if isinstance(tensor, Tensor) and tensor.ndim:
            tensors[name] = Named(
                tuple(tensor.shape), not tensor.is_floating_point(), partial(_rows_of_name, held, name)
            )
    return Source("npz", tensors)


def _rows_of_name(held: tensor_input._Named, name: str, start: int, stop: int) -> Tensor:
    tensor = held.get(name)
    assert isinstance(tensor, Tensor)  # npz has nothing else
    return tensor[start:stop]


def _from_torch(path: Path) -> Source:
    """What ``torch.save`` wrote of plain tensors; files with objects in them are not opened."""
    refused = StatesError(
        f"{path.name} is a pickle that may hold more than plain tensors; it was not opened.",
        "Such dumps often have token ids beside the states: save its tensors with safetensors where it was "
        "made.",
    )
    if path.suffix.lower() in _PICKLES:
        raise refused
    try:
        held = tensor_input._from_torch(path)
    except StatesError as error:
        if "cannot be read as plain tensors" in error.message:
            raise refused from error
        raise
    if isinstance(held, Tensor):
        return Source("torch", {"": _of_tensor(held)} if held.ndim else {})
    if isinstance(held, list):
        return Source("torch", {}, listed=tuple(held))
    return _of_names(held)


def _of_names(held: tensor_input._Named) -> Source:
    tensors: dict[str, Named] = {}
    unread: list[str] = []
    listed: tuple[Any, ...] = ()
    for name in held.names:
        try:
            found = held.get(name)
        except StatesError:
            unread.append(name)
            continue
        if isinstance(found, Tensor):
            if found.ndim:
                tensors[name] = _of_tensor(found)
        elif not listed:
            listed = tuple(found)
        else:
            unread.append(name)
    return Source("torch", tensors, listed=listed, unread=tuple(unread))


def _of_tensor(tensor: Tensor) -> Named:
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool and not tensor.is_complex()
    return Named(tuple(tensor.shape), whole, lambda start, stop: tensor[start:stop].clone())


def listed_as_tensors(
    path: Path, source: Source, layers: Callable[[int], tuple[int | str, ...] | None]
) -> Source:
    """The source with a plain list of its turned into names: a cache's blocks, or the layers of a pass.

    ``layers``: which layers so many tensors are of; None where that cannot be told.
    """
    if not source.listed:
        return source
    tensors, unread = dict(source.tensors), source.unread
    if is_cache(source.listed):
        for block, pair in enumerate(source.listed):
            tensors |= {f"keys.{block}": _of_tensor(pair[0]), f"values.{block}": _of_tensor(pair[1])}
    elif all(isinstance(one, Tensor) and one.ndim in (2, 3) for one in source.listed):
        named = layers(len(source.listed))
        if named is None:
            unread = (*unread, f"list of {len(source.listed)} tensors")
        for layer, one in zip(named or (), source.listed, strict=False):
            tensors[f"hidden_states.{layer}"] = _of_tensor(one)
    else:
        raise StatesError(
            f"{path.name} holds a list that is neither of layers nor of a cache.", "Name its tensors."
        )
    return Source(source.kind, tensors, source.about, (), unread)
