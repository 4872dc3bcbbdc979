"""Keys and values as caches hold them: of every block, prompt x heads x position x size of a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from preimage.errors import LayerError, StatesError
from preimage.models import LanguageModel, ModelPreview
from preimage.observations import Observation

IN_A_CACHE = ("keys", "values", "kv")  # what can be seen there


class CachedBlock(NamedTuple):
    """What a cache holds of one block; it has seen ``tokens`` of a prompt, and may hold fewer."""

    keys: Tensor
    values: Tensor
    tokens: int

    @property
    def whole(self) -> bool:
        """Whether every token it has seen is still there."""
        return self.keys.shape[-2] >= self.tokens


def is_cache(x: object) -> bool:
    """Whether this is a ``past_key_values``: a cache of transformers, or a tuple of (keys, values)."""
    if hasattr(x, "layers") and hasattr(x, "get_seq_length"):
        return True
    return isinstance(x, tuple | list) and len(x) > 0 and all(_is_pair(part) for part in x)


def _is_pair(part: object) -> bool:
    # transformers' own caches, listed, give what windows they have as a third part
    if not isinstance(part, tuple | list) or len(part) not in (2, 3):
        return False
    return all(isinstance(tensor, Tensor | np.ndarray) and tensor.ndim == 4 for tensor in part[:2])


def read_cache(
    cache: Any, layer: int | None, n_layers: int, place: str
) -> tuple[int, Shaped[Tensor, "prompt position width"]]:
    """A block of a cache and its keys, its values, or both side by side; the lowest where none is named."""
    blocks = _blocks(cache)
    if not blocks:
        raise StatesError("This cache is empty.", "Give the one that a pass with use_cache=True returned.")
    if max(blocks) > n_layers:
        raise StatesError(
            f"This cache holds {max(blocks)} blocks, the model has {n_layers}.", "Use the model that made it."
        )
    whole = [block for block in sorted(blocks) if blocks[block].whole]
    if layer is None and whole:
        layer = whole[0]
    if layer is not None and layer not in blocks:
        held = ", ".join(map(str, sorted(blocks)))
        raise LayerError(f"This cache holds nothing of block {layer}.", f"It holds {held}.")
    layer = min(blocks) if layer is None else layer
    keys, values, tokens = blocks[layer]
    if not blocks[layer].whole:
        raise StatesError(
            f"Block {layer} of this cache keeps {keys.shape[-2]} of {tokens} tokens: a window, or a part of "
            "it is quantised.",
            f"Choose a block that is whole: {', '.join(map(str, whole))}."
            if whole
            else "Give shorter prompts, or a cache without a window (DynamicCache() without a config).",
        )
    seen = {"keys": (keys,), "values": (values,), "kv": (keys, values)}[place]
    return layer, torch.cat([join_heads(part[:, :, :tokens]) for part in seen], dim=-1)


def _blocks(cache: Any) -> dict[int, CachedBlock]:
    """Every block that a cache holds anything of, by its number."""
    blocks: dict[int, CachedBlock] = {}
    if isinstance(cache, Sequence):
        pairs = [(torch.as_tensor(part[0]), torch.as_tensor(part[1])) for part in cache]
        longest = max(keys.shape[-2] for keys, _ in pairs)
        blocks = {
            number: CachedBlock(keys, values, longest)
            for number, (keys, values) in enumerate(pairs, start=1)
            if keys.numel()
        }
    else:
        for number, layer in enumerate(cache.layers, start=1):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is not None and values is not None and keys.numel():
                blocks[number] = CachedBlock(keys, values, int(layer.get_seq_length()))
    for number, (keys, values, _) in blocks.items():
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise StatesError(
                f"Block {number} of this cache has keys {tuple(keys.shape)} and values "
                f"{tuple(values.shape)}.",
                "Give prompt x heads x position x size of a head.",
            )
    return blocks


def join_heads(
    tensor: Shaped[Tensor, "prompt heads position size"],
) -> Shaped[Tensor, "prompt position width"]:
    """The heads of every position one after another, as the projections make them."""
    return tensor.transpose(1, 2).flatten(2)


def head_sizes(model: LanguageModel | ModelPreview) -> tuple[int, int]:
    """How many heads keys and values have, and the size of one, by the model's config."""
    if not isinstance(model, LanguageModel):
        raise StatesError("Keys and values have a width that only the loaded model tells.", "Load it.")
    config = model.config
    queries = config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or queries
    return int(heads), int(getattr(config, "head_dim", None) or model.d_model // queries)


def observed_width(model: LanguageModel | ModelPreview, observation: Observation) -> int:
    """How many numbers an observation has of each position."""
    if observation.kept is not None:
        return len(observation.kept)
    if observation.rotation is not None:
        return int(observation.rotation.shape[-1])
    if observation.place not in IN_A_CACHE:
        return model.d_model
    heads, size = head_sizes(model)
    return heads * size * (2 if observation.place == "kv" else 1)
