"""What a model itself knows of every token, from which keys and entries are made."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preimage.inversion.proposers.lens import LensShape
from preimage.models import LanguageModel
from preimage.progress import stage

_BLOCK = 2  # the block whose states, beside the embedding, describe a token
_CONTEXT_TOKEN = 0
_CHUNK = 1024

_features: weakref.WeakKeyDictionary[LanguageModel, tuple[int, Tensor]] = weakref.WeakKeyDictionary()


def features_of(model: LanguageModel) -> Float[Tensor, "vocabulary d_features"]:
    """The token features, computed once for a model in memory."""
    edition, known = _features.get(model, (-1, None))
    if known is None or edition != model.edition:
        known = token_features(model).clone()
        _features[model] = model.edition, known
    return known


def embedding_features(model: LanguageModel) -> Float[Tensor, "vocabulary d_embedding"]:
    """The same of the embedding alone: no block runs."""
    return _normalised(model.embedding_table)


def features_for(model: LanguageModel, shape: LensShape) -> Float[Tensor, "vocabulary d_features"]:
    """What the keys of a lens of this shape are made of."""
    return embedding_features(model) if shape.key_hidden else features_of(model)


def features_in_parts(model: LanguageModel, shape: LensShape) -> Iterator[Float[Tensor, "some d_features"]]:
    """The same, some tokens at a time."""
    if shape.key_hidden:
        yield from _normalised_parts(model.embedding_table)
    else:
        yield from features_of(model).split(_CHUNK)


def features_width(model: LanguageModel, key_hidden: int = 0) -> int:
    """How wide the features of a lens are."""
    width = model.embed(torch.zeros(1, dtype=torch.long)).shape[-1]
    return width if key_hidden else width + model.d_model


@torch.inference_mode()
def token_features(model: LanguageModel) -> Float[Tensor, "vocabulary d_features"]:
    """What the model itself knows of every token: its embedding, and its state after two blocks.

    The state is that of the token behind one fixed token. Both halves are centred over the vocabulary and
    normalised. Costs a pass of the vocabulary through two blocks (some seconds on two cores).
    """
    stage("token features")
    behind = model.prefix(min(_BLOCK, model.n_layers))
    behind.extend(torch.tensor([_CONTEXT_TOKEN]))
    chunks = torch.arange(model.vocab_size).split(_CHUNK)
    states = torch.cat([behind.try_tokens(chunk).float() for chunk in chunks])
    return torch.cat([_normalised(half) for half in (model.embedding_table, states)], dim=1)


def _normalised(rows: Float[Tensor, "vocabulary d"]) -> Float[Tensor, "vocabulary d"]:
    return torch.cat(list(_normalised_parts(rows)))


@torch.inference_mode()
def _normalised_parts(rows: Float[Tensor, "vocabulary d"]) -> Iterator[Float[Tensor, "some d"]]:
    """The rows, centred and of length 1, some at a time: to copy them all costs more than the work."""
    mean = rows.mean(dim=0, dtype=torch.float32)
    for part in rows.split(_CHUNK):
        yield nn.functional.normalize(part.float() - mean, dim=1)
