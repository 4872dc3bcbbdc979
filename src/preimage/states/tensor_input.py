"""States in files people have: safetensors, npy, npz, and what torch.save wrote of plain tensors.

A file is data from a stranger: no code in it is run, and what it claims is held against its size before any
memory is taken.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from preimage.errors import LayerError, StatesError, first_line, shown
from preimage.states.scales import is_beside, multiplied, scale_of, zero_of
from preimage.storage.tensor_file import TensorFileReader

MASKS = ("attention_mask", "mask")  # names by which a mask is known
_GROWTH = 100  # numbers do not compress so well; a file that grows so much was made to fill the memory
# Names that say a layer, such as hidden_states.15, layer_15 and 15; those of modules count from 0 and do not.
NUMBERED = re.compile(r"(hidden_states?[._/-]?|layers?[._/-]?)?0*([0-9]{1,9}|final)", re.IGNORECASE)
# A tensor, or several: prompts of several lengths, all of hidden_states, or the keys and values of a cache.
Held: TypeAlias = Tensor | list[Any]


class StatesFile(NamedTuple):
    """What a file holds: states as :func:`preimage.states_from` takes them, a mask, and the states' name."""

    states: Held
    mask: Tensor | None
    key: str | None


def read_states_file(
    path: str | Path,
    key: str | None = None,
    mask_key: str | None = None,
    layer: int | str | None = None,
    scale_key: str | None = None,
) -> StatesFile:
    """The states in a file, and the attention mask beside them.

    ``key`` names the states where a file holds several tensors; else a name such as ``hidden_states.15``
    that says ``layer``. ``mask_key`` names the mask; else ``attention_mask`` or ``mask``, if one is there.
    Codes of 8 bits are multiplied by their scales: those of ``scale_key``, else of the same name with
    ``_scale`` behind it, or ``scale``; zero points likewise.
    """
    path = Path(path)
    if not path.is_file():
        raise StatesError(f"There is no file {path}.", "Check the path.")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise StatesError(
            f"{path.name} is none of {', '.join(_READERS)}.",
            "Save the states with safetensors.torch.save_file, numpy.save or torch.save.",
        )
    held = read(path)
    if not isinstance(held, NamedTensors):
        if key is not None or mask_key is not None or scale_key is not None:
            raise StatesError(f"{path.name} holds nothing by a name.", "Leave out the key.")
        return StatesFile(held, None, None)
    mask = _choose_mask(path, held.names, mask_key)
    beside = (mask, scale_key, *MASKS)
    states = [one for one in held.names if one not in beside and not is_beside(one)]
    name = _choose(path, states, held.names, key, layer)
    found = _decoded(path, held, name, scale_key)
    return StatesFile(found, None if mask is None else _tensor(path, held.get(mask)), name)


class NamedTensors(NamedTuple):
    """Tensors by name, each read when it is asked for; ``others``: plain values beside them, such as text."""

    names: list[str]
    get: Callable[[str], Held]
    others: Mapping[str, Any] = MappingProxyType({})


def _decoded(path: Path, held: NamedTensors, name: str, scale_key: str | None) -> Held:
    """The states of a name; codes are multiplied by the scales beside them."""
    found = held.get(name)
    if isinstance(found, Tensor) and not found.ndim:
        raise StatesError(f"{shown(name)} is a single number.", "Give positions x d_model.")
    scale = scale_key or scale_of(name, held.names)
    if scale_key is not None and scale_key not in held.names:
        raise StatesError(f"{path.name} holds no tensor {scale_key!r}.", _name_one(held.names, "--scale-key"))
    if scale is None or not isinstance(found, Tensor) or found.dtype.itemsize > 1:
        if scale_key is not None:
            raise StatesError(f"{shown(name)} holds no codes of 8 bits.", "Leave out --scale-key.")
        return found
    zero = zero_of(name, held.names)
    parts = [None if one is None else held.get(one) for one in (scale, zero)]
    if not all(part is None or isinstance(part, Tensor) for part in parts):
        raise StatesError(f"The scales in {path.name} are a list.", "Save one tensor of them.")
    return multiplied(found, *parts)  # type: ignore[arg-type]  # tensors, see above


def _choose_mask(path: Path, names: list[str], mask_key: str | None) -> str | None:
    there = [name for name in MASKS if name in names]
    if mask_key is not None:
        if mask_key not in names:
            raise StatesError(f"{path.name} holds no tensor {mask_key!r}.", _name_one(names, "--mask-key"))
        return mask_key
    if len(there) > 1:
        raise StatesError(f"{path.name} holds {' and '.join(there)}.", _name_one(there, "--mask-key"))
    return there[0] if there else None


def _choose(
    path: Path, candidates: list[str], names: list[str], key: str | None, layer: int | str | None
) -> str:
    """The name of the states: the one given, the only one, or the only one that says the layer."""
    if key is not None:
        if key in names:
            return key
        raise StatesError(f"{path.name} holds no tensor {key!r}.", _name_one(names, "--key"))
    if len(candidates) == 1:
        return candidates[0]
    said = {name: match.groups() for name in candidates if (match := NUMBERED.fullmatch(name))}
    layers = {int(number) for kind, number in said.values() if number.isdecimal() and is_hidden(kind)}
    whole = len(layers) == max(layers, default=0) + 1 > 1  # all of outputs.hidden_states
    fitting = [
        name
        for name, (kind, number) in said.items()
        if number == str(layer)
        or (whole and is_hidden(kind) and (layer, number) == ("final", str(max(layers))))
    ]
    if len(fitting) != 1:
        raise StatesError(f"{path.name} holds {len(names)} tensors.", _name_one(names, "--key"))
    kind, number = said[fitting[0]]
    if whole and is_hidden(kind) and layer != "final" and int(number) == max(layers):
        raise LayerError(
            f"{shown(fitting[0])} is the last of hidden_states: what leaves the final norm.",
            "Ask for layer final, or name it with --key.",
        )
    return fitting[0]


def is_hidden(kind: str | None) -> bool:
    """Whether a name counts as outputs.hidden_states does, whose last one is after the final norm."""
    return kind is not None and kind.lower().startswith("hidden")


def _name_one(names: list[str], option: str) -> str:
    listed = ", ".join(map(shown, names[:8])) or "none"
    return f"Name one of {listed}{' …' if len(names) > 8 else ''} with {option}."


def _from_safetensors(path: Path) -> NamedTensors:
    reader = TensorFileReader(path)

    def get(name: str) -> Tensor:
        shape = reader.shapes[name]
        return reader.rows(name, 0, shape[0]) if shape else reader.number(name)

    return NamedTensors(sorted(reader.shapes), get)


def _from_npy(path: Path) -> Tensor:
    try:
        with np.errstate(over="raise"):  # a shape the file cannot hold fails here, before any memory
            array = np.lib.format.open_memmap(path, mode="r")
        return _own(array)
    except Exception as error:  # headers are Python's literals, and its parser stumbles in many ways
        raise _no_array(path, error) from error


def open_npz(path: Path) -> NamedTensors:
    """The arrays of an npz archive; one that would fill the memory is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_growth(path, archive)
            members = _members(archive)
    except Exception as error:  # whatever a stranger's archive makes its readers stumble over
        raise _no_array(path, error) from error

    def get(name: str) -> Tensor:
        try:
            with zipfile.ZipFile(path) as archive:
                _npz_header(archive, members[name])
            with np.load(path, allow_pickle=False) as arrays:
                return _own(arrays[name])
        except Exception as error:  # as above
            raise _no_array(path, error) from error

    return NamedTensors(sorted(members), get)


def npz_headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None]:
    """Shape and type of every array of an archive, and nothing else of it; None where it is damaged."""
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]] | None] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name, member in _members(archive).items():
                found[name] = None
                with suppress(Exception):  # as above
                    found[name] = _npz_header(archive, member)
    except Exception as error:  # as above
        raise _no_array(path, error) from error
    return found


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    return {info.filename.removesuffix(".npy"): info for info in archive.infolist()}


def _npz_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, which must be just what its member holds."""
    with archive.open(member) as file:
        old = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if old else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise ValueError(f"its shape {shape} is not what it holds")
    return shape, dtype


def _own(array: Any) -> Tensor:
    """A tensor of one's own, not a view of a file."""
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _no_array(path: Path, error: Exception) -> StatesError:
    reason = first_line(error).rstrip(".")
    return StatesError(
        f"{path.name} cannot be read as a plain array: {reason}.", "Save it with numpy.save as floats."
    )


def _check_growth(path: Path, archive: zipfile.ZipFile) -> None:
    if sum(info.file_size for info in archive.infolist()) > _GROWTH * path.stat().st_size:
        raise ValueError("it would grow more than a hundredfold")


def open_torch(path: Path) -> Held | NamedTensors:
    """What ``torch.save`` wrote: a tensor, a list of them, or a dict of them; anything else is refused."""
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                    raise ValueError("it is compressed, which torch.save never does")
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # whatever a stranger's bytes make the unpickler stumble over
        raise StatesError(
            f"{path.name} cannot be read as plain tensors: {type(error).__name__}.",
            "Only tensors, and lists and dicts of them, are read, never objects: save them with safetensors.",
        ) from error
    if not isinstance(held, Mapping):
        return _checked(path, held)
    by_name = {str(name): value for name, value in held.items() if isinstance(value, Tensor | list | tuple)}
    names = [str(name) for name in held]
    if len(set(names)) < len(names):
        raise StatesError(f"{path.name} holds two things by one name.", "Save it with other names.")
    if not by_name:
        raise StatesError(f"{path.name} holds a dict without tensors.", "Save the tensors in one flat dict.")
    others = {str(name): value for name, value in held.items() if not isinstance(value, Tensor)}
    return NamedTensors(list(by_name), lambda name: _checked(path, by_name[name]), others)


def _checked(path: Path, held: Any) -> Held:
    """Tensors that are really in the file: they may claim shapes over few numbers that repeat."""
    parts = held if isinstance(held, list | tuple) else [held]
    if sum(len(part) if isinstance(part, list | tuple) else 1 for part in parts) > path.stat().st_size:
        raise StatesError(f"{path.name} names its tensors over and over.", "Save each of them once.")
    tensors = [one for part in parts for one in (part if isinstance(part, list | tuple) else [part])]
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise StatesError(
            f"{path.name} holds a {type(held).__name__} that is not of tensors.",
            "Save a tensor, a list of tensors, or a flat dict.",
        )
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if any(tensor.layout != torch.strided for tensor in tensors) or claimed > path.stat().st_size:
        raise StatesError(f"{path.name} does not hold all numbers of its tensors.", "Save dense tensors.")
    return held if isinstance(held, Tensor) else list(held)


def _tensor(path: Path, held: Held) -> Tensor:
    if isinstance(held, Tensor):
        return held
    raise StatesError(f"The mask in {path.name} is a list.", "Save prompt x position of 0 and 1.")


_READERS: dict[str, Callable[[Path], Held | NamedTensors]] = {
    ".safetensors": _from_safetensors,
    ".npy": _from_npy,
    ".npz": open_npz,
    **dict.fromkeys((".pt", ".pth", ".bin"), open_torch),
}
