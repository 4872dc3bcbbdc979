"""What makes a model the same model: its weights in memory or in its files, hashed.

Loading a model to find out that it is the wrong one takes seconds; hashing its files takes a moment and needs
no torch. That hash is over the tensors, not the files: sharding and metadata do not change it.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preimage.models.offloaded import offloaded, replaced_forward, version, versions
from preimage.storage import parse_json

if TYPE_CHECKING:
    from torch import Tensor, nn

_MAX_HEADER = 100 * 2**20  # the format's own limit
_MOST_BYTES = 2**63  # of a file


@dataclass(frozen=True)
class ModelIdentity:
    """Written into every bundle and result; two models agree when their ``weight_hash`` does."""

    name: str
    revision: str | None
    architecture: str
    weight_hash: str
    dtype: str
    n_layers: int
    d_model: int
    vocab_size: int
    files_hash: str | None = None  # of the files it came from, to know a wrong one before loading it

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


def weight_hash(backbone: nn.Module) -> str:
    """SHA-256 over names, shapes, types and bytes of a backbone's parameters.

    The LM head is left out, because no hidden state depends on it: the same weights loaded with and without
    a head are the same model. The values are those in memory, so another dtype is another hash; weights that
    are brought in for a pass alone are read one by one.
    """
    named = sorted(backbone.named_parameters(), key=lambda item: item[0])
    away = offloaded(backbone)

    def digest(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        return _tensor_digest(name, away[name].read(tensor) if name in away else tensor)

    with ThreadPoolExecutor(1 if away else None) as pool:  # hashlib lets go of the interpreter lock
        digests = list(pool.map(digest, named))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _tensor_digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    from preimage.models.coded import parts_of
    from preimage.storage.tensor_file import tensor_bytes  # which imports torch

    for part in parts_of(tensor):
        digest.update(tensor_bytes(part))
    return digest.digest()


def tokenizer_hash(tokenizer: Any) -> str | None:
    """SHA-256 of a fast tokenizer's serialisation, else of a vocabulary; None without either."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        said = json.loads(inner.to_str()) | {"truncation": None, "padding": None}  # those of its last call
    elif hasattr(tokenizer, "get_vocab"):
        said = tokenizer.get_vocab()
    else:
        return None
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def alterations(module: nn.Module) -> tuple[int, ...]:
    """Numbers of what was hooked into a module or put in place of a forward pass; none for a plain one."""
    numbers: list[int] = []
    for part in module.modules():
        numbers += [*part._forward_pre_hooks, *part._forward_hooks]
        forward = replaced_forward(part)
        if forward is not None:
            numbers.append(id(forward))
    return tuple(numbers)


def fingerprint(module: nn.Module, embedding: nn.Module) -> tuple[object, ...]:
    """What changes when weights or hooks are changed in place.

    Of weights their version counters are read, which changes through ``.data`` pass by; of the embedding
    table, which says what a token can be mistaken for, one column as well. Of a weight that is read from a
    file it is the file's date.
    """
    away = offloaded(module)
    tensors = [t for name, t in module.named_parameters() if name not in away]
    counted = [(t.data_ptr(), version(t)) for t in (*tensors, *module.buffers())]
    return (*counted, *versions(away), _first_column(embedding), *alterations(module))


def _first_column(embedding: nn.Module) -> float:
    """The sum of one column of an embedding table; 0 where the table is in a file."""
    name, table = next(embedding.named_parameters())
    place = offloaded(embedding).get(name)
    held = table if place is None else place.held
    if held is None:
        return 0.0
    return float(held.detach().reshape(len(held), -1)[:, 0].double().nan_to_num().sum())


def hash_files(folder: Path) -> str | None:
    """SHA-256 over names, types, shapes and bytes of all tensors; None where there are none."""
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


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each of its tensors, and where in the file their bytes begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise ValueError("the header is too large")
        header = parse_json(file.read(size))
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    header.pop("__metadata__", None)
    for about in header.values():
        start, end = about["data_offsets"]
        if not 0 <= start <= end < _MOST_BYTES:
            raise ValueError("the header names bytes that no file has")
    return header, 8 + size


def _entries(path: Path) -> list[tuple[str, str, str, int, int]]:
    """(name, type and shape, file, start, end) of every tensor of a file."""
    header, begin = read_header(path)
    entries = []
    for name, about in header.items():
        start, end = (begin + offset for offset in about["data_offsets"])
        entries.append((name, f"{about['dtype']} {about['shape']}", str(path), start, end))
    return entries


def _digest(entry: tuple[str, str, str, int, int]) -> bytes:
    name, about, path, start, end = entry
    digest = hashlib.sha256(f"{name} {about}".encode())
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (chunk := file.read(min(1 << 24, end - start))):
            digest.update(chunk)
            start += len(chunk)
    return digest.digest()
