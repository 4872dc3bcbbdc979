"""How much memory a model's weights take, from the headers of their files, before any of them is read."""

from __future__ import annotations

import logging
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING

from preimage.devices import free_bytes
from preimage.errors import ModelError
from preimage.models.identity import read_header
from preimage.models.locating import ModelFiles
from preimage.storage import parse_json

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_GB = 10**9
_LARGE = _GB  # weights of which a word is said before they are loaded
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_CAST = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # bytes; tensors of other types are loaded as they are


def weight_bytes(files: ModelFiles, dtype: str) -> int | None:
    """Bytes that a model's weights take in ``dtype``; None where its files do not tell, as GGUF does not."""
    try:
        entries = [about for path in _weight_files(files.path) for about in read_header(path)[0].values()]
        return sum(_tensor_bytes(about["dtype"], about["data_offsets"], dtype) for about in entries) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: loading will say so properly


def require_layers(folder: Path, layers: int | None) -> None:
    """Refuse more layers than a model's files hold tensors, before modules are made for them all."""
    try:
        tensors = sum(len(read_header(path)[0]) for path in _weight_files(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # damaged: loading will say so properly
    if layers is not None and layers > tensors:
        raise ModelError(
            f"{folder}/config.json has {reprlib.repr(layers)} layers, and the weights are {tensors} tensors.",
            "Get the whole model again, or correct config.json.",
        )


def require_room(files: ModelFiles, dtype: str, device: torch.device | None) -> None:
    """Say how large large weights are, and refuse what a device cannot hold; None: spread over several."""
    size = weight_bytes(files, dtype)
    if size is None:
        return
    weights = f"{size / _GB:.1f} GB of weights in {dtype}"
    free = None if device is None else free_bytes(device)
    if free is not None and size > free:
        raise ModelError(
            f"{files.name} has {weights}, and {device} has {free / _GB:.1f} GB free.", _smaller(dtype)
        )
    if size > _LARGE:
        there = "" if free is None else f" ({free / _GB:.0f} GB there)"
        log.info("%s: %s %s%s", files.name, weights, f"on {device}" if device else "by device map", there)


def _smaller(dtype: str) -> str:
    spread = "--device-map auto (device_map) to spread it over devices, memory and disk"
    return f"Use {'' if _BYTES[dtype] == 2 else '--dtype bf16, or '}{spread}."


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: the one of that name, else those of the index, else all."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return sorted(folder.glob("*.safetensors"))


def _tensor_bytes(kind: str, offsets: list[int], dtype: str) -> int:
    size = offsets[1] - offsets[0]
    return size // _CAST[kind] * _BYTES[dtype] if kind in _CAST else size
