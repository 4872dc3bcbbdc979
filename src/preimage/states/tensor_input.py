"""Tensors people already have, read from safetensors or npy files; pickles are never opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from preimage.errors import StatesError
from preimage.storage.tensor_file import TensorFileReader


def read_tensor(path: str | Path, key: str | None = None) -> Tensor:
    """The tensor in a file; ``key`` names it where a safetensors file holds several."""
    path = Path(path)
    if not path.is_file():
        raise StatesError(f"There is no file {path}.", "Check the path.")
    if path.suffix.lower() == ".safetensors":
        return _from_safetensors(path, key)
    if path.suffix.lower() == ".npy":
        return _from_npy(path)
    raise StatesError(
        f"{path.name} is neither .safetensors nor .npy.",
        "Save the tensor with safetensors.torch.save_file or numpy.save; pickles are never opened.",
    )


def _from_safetensors(path: Path, key: str | None) -> Tensor:
    reader = TensorFileReader(path)
    names = sorted(reader.shapes)
    if key is None and len(names) == 1:
        key = names[0]
    if key is None or key not in reader.shapes:
        raise StatesError(
            f"{path.name} holds no tensor {key!r}." if key else f"{path.name} holds {len(names)} tensors.",
            f"Name one of {', '.join(names[:8])}{' …' if len(names) > 8 else ''} with --key.",
        )
    shape = reader.shapes[key]
    if not shape:
        raise StatesError(f"{key!r} is a single number.", "Give positions x d_model.")
    return reader.rows(key, 0, shape[0])


def _from_npy(path: Path) -> Tensor:
    try:
        with np.errstate(over="raise"):  # a shape the file cannot hold fails here, before any memory
            array = np.lib.format.open_memmap(path, mode="r")
        native = array.dtype.newbyteorder("=")
        return torch.from_numpy(np.array(array, dtype=native, order="C"))
    except (ValueError, OSError, TypeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise StatesError(
            f"{path.name} cannot be read as a plain array: {reason}.", "Save it with numpy.save as floats."
        ) from error
