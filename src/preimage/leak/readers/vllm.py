"""What vLLM writes: hidden states of requests, and blocks of keys and values in its file tier.

After the source of vLLM 0.33.0. A request's file is safetensors: ``hidden_states`` [tokens, layers, d] and
``token_ids``. Which layers they are stands in the server's configuration alone; they ascend, and vLLM counts
as we do: 0 enters the first block, k leaves block k, before the last norm also where k is the last.
Blocks are read in :mod:`preimage.leak.readers.vllm_blocks`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from preimage.errors import StatesError, shown
from preimage.layers import parse_layer
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.leak.readers import vllm_blocks
from preimage.leak.readers.raw import is_file
from preimage.observations import Observation
from preimage.storage.tensor_file import TensorFileReader

KIND = "vLLM hidden states"
_NAMES = {"hidden_states", "token_ids"}
_LONGEST_HEADER = 1 << 16  # of two tensors; that of a whole model is not ours
_MOST_TOKENS, _MOST_LAYERS, _WIDEST = 1 << 21, 1 << 12, 1 << 17
_STORED = {torch.float32: "float32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ASK = "Say which layers the server was told to extract (eagle_aux_hidden_state_layer_ids), ascending"


def read(path: Path, told: Told) -> Holding | None:
    """What a request's file or a block holds; None where the file is neither."""
    if not is_file(path):
        return None
    header = _header(path)
    if header is None or set(header) != _NAMES:
        return vllm_blocks.read(path, told)
    if [_axes(header[name]) for name in ("hidden_states", "token_ids")] != [3, 1]:
        return None  # other makers use these names too, for batches or for one layer
    file = _opened(path)
    tokens, count, d_model = _shape(path, file)
    if told.sizes is not None and told.sizes.d_model != d_model:
        raise StatesError(
            f"{shown(path.name)} holds states of width {d_model}, the model has {told.sizes.d_model}.",
            "Use the model that made them.",
        )
    ids = _token_ids(path, file, tokens)
    stored = _stored(path, file)
    layers = _layers(path, count, told)
    notes = ["Token ids stand beside the states: whoever has the file needs no inversion."] if ids else []
    if layers is None:
        notes.append(f"The file does not say which {count} layers it holds. {_ASK}.")
    seen = tuple(
        Seen(layer, _observation(layer, stored), partial(_slice, path, index, (tokens, count, d_model)))
        for index, layer in enumerate(layers or ())
    )
    clear = (Clear("the tensor token_ids", ids),) if ids else ()
    about = (
        f"{count} layers of {tokens} tokens, width {d_model}, written by vLLM's hidden-state extraction; "
        "known by its two tensors."
    )
    return Holding((path,), KIND, about, (Piece(path.name, tokens, 0, seen, clear),), tuple(notes))


def _header(path: Path) -> dict[str, object] | None:
    """The tensors of a short safetensors header; None where there is none. Nothing else is read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                return None
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _axes(entry: object) -> int | None:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return len(shape) if isinstance(shape, list) else None


def _opened(path: Path) -> TensorFileReader:
    """The file, whose shapes its size was held against."""
    try:
        return TensorFileReader(path)
    except StatesError as error:
        raise StatesError(
            f"{shown(path.name)} has the header of vLLM's hidden states, but not what it says.",
            "It is cut short or damaged: make it again.",
        ) from error


def _shape(path: Path, file: TensorFileReader) -> tuple[int, int, int]:
    tokens, count, d_model = file.shapes["hidden_states"]
    if not (0 < tokens <= _MOST_TOKENS and 0 < count <= _MOST_LAYERS and 0 < d_model <= _WIDEST):
        raise StatesError(
            f"{shown(path.name)} says it holds {tokens} tokens of {count} layers of width {d_model}.",
            f"Up to {_MOST_TOKENS} tokens, {_MOST_LAYERS} layers and a width of {_WIDEST} are read; requests "
            "of embeddings alone hold none.",
        )
    return tokens, count, d_model


def _token_ids(path: Path, file: TensorFileReader, tokens: int) -> tuple[int, ...]:
    """One id a token, or none where the prompt was given as embeddings."""
    count = file.shapes["token_ids"][0]
    found = file.rows("token_ids", 0, min(count, tokens))
    if count not in (0, tokens) or (count and found.dtype not in (torch.int64, torch.int32)):
        raise StatesError(
            f"{shown(path.name)} holds {count} token ids ({found.dtype}) beside {tokens} tokens.",
            "vLLM writes one whole number a token: the file is damaged, or of another maker.",
        )
    ids = tuple(found.tolist())
    if any(not 0 <= one < 1 << 32 for one in ids):
        raise StatesError(
            f"{shown(path.name)} holds token ids that no vocabulary has.", "The file is damaged."
        )
    return ids


def _stored(path: Path, file: TensorFileReader) -> str:
    dtype = file.dtypes["hidden_states"]
    if dtype is None or dtype not in _STORED:
        raise StatesError(
            f"The hidden states in {shown(path.name)} are of a type that is not read.",
            f"They may be {', '.join(_STORED.values())}.",
        )
    return _STORED[dtype]


def _layers(path: Path, count: int, told: Told) -> tuple[int | str, ...] | None:
    """The layers in their order: told, or all of them; None where nobody says."""
    n_layers = None if told.sizes is None else told.sizes.n_layers
    given = told.layers
    if given is None:
        return tuple(range(count)) if n_layers is not None and count == n_layers + 1 else None
    if len(given) != count or len(set(map(str, given))) != count:
        raise StatesError(
            f"{shown(path.name)} holds {count} layers, {len(given)} were given.", f"{_ASK}, each once."
        )
    return tuple(given) if n_layers is None else tuple(parse_layer(layer, n_layers) for layer in given)


def _observation(layer: int | str, stored: str) -> Observation:
    return Observation("final" if layer == "final" else "residual", stored=stored)


def _slice(path: Path, index: int, shape: tuple[int, int, int]) -> Float[Tensor, "token d_model"]:
    """One layer of all tokens, and no other, in memory."""
    try:
        with safe_open(path, framework="pt") as file:
            part = file.get_slice("hidden_states")
            if tuple(part.get_shape()) != shape:
                raise StatesError(f"{shown(path.name)} has changed since it was opened.", "Open it again.")
            layer: Tensor = part[:, index, :]
    except (SafetensorError, OSError, RuntimeError) as error:
        raise StatesError(
            f"{shown(path.name)} cannot be read as safetensors any more.", "Check the file."
        ) from error
    return layer.reshape(shape[0], shape[2])
