"""Proposers: from observed states to a ranking of the vocabulary at every position, all at once.

A proposer is a set of keys, one for each token, and a way to turn states into queries; a token's score is
query . key + bias. No prefix is needed, so every position is ranked in parallel. Nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.inversion.lens import Lens, token_features
from preimage.inversion.lens_files import find_lens, read_lens
from preimage.layers import Layer
from preimage.models import LanguageModel

_SCORES = 2**24  # scores held at once when the best token of many positions is looked for


@dataclass(frozen=True)
class Keys:
    """What queries are scored against."""

    keys: Float[Tensor, "vocabulary rank"]
    bias: Float[Tensor, " vocabulary"]

    def best(self, queries: Float[Tensor, "row rank"]) -> Int[Tensor, " row"]:
        """The first choice for every query."""
        rows = max(1, _SCORES // len(self.bias))
        parts = [torch.addmm(self.bias, part, self.keys.T).argmax(dim=1) for part in queries.split(rows)]
        return torch.cat(parts)

    def order(self, query: Float[Tensor, " rank"]) -> Int[Tensor, " vocabulary"]:
        """Every token, most likely first."""
        return (self.keys @ query + self.bias).argsort(descending=True)


@runtime_checkable
class Proposer(Protocol):
    """Ranks the vocabulary at every position of every prompt."""

    name: str

    def queries(
        self, observed: Float[Tensor, "prompt position d_model"]
    ) -> Float[Tensor, "prompt position rank"]:
        """One query a position."""

    def keys(self, position: int) -> Keys:
        """What the queries of a position are scored against."""


class LensProposer:
    """A trained lens."""

    def __init__(self, lens: Lens, features: Float[Tensor, "vocabulary d_features"]) -> None:
        self.name = "lens"
        self._lens = lens
        with torch.inference_mode():
            self._keys = Keys(lens.keys(features), lens.bias.detach())

    def queries(
        self, observed: Float[Tensor, "prompt position d_model"]
    ) -> Float[Tensor, "prompt position rank"]:
        """One query a position."""
        with torch.inference_mode():
            return self._lens.queries(observed)

    def keys(self, position: int) -> Keys:
        """The same keys at every position."""
        return self._keys


_CONTEXT = 8  # tokens before the one whose state goes into the codebook
_SAMPLES = 64  # prompts of text (or random tokens) that whiten it


class CodebookProposer:
    """No training: one state for every token, and distances whitened by how states of one token vary.

    The first position is looked up exactly, since nothing precedes it; other positions are compared with the
    token's state behind a fixed random context. Costs two passes of the vocabulary through the blocks.
    """

    def __init__(self, model: LanguageModel, layer: Layer, sample: Int[Tensor, "prompt position"]) -> None:
        self.name = "codebook"
        generator = torch.Generator().manual_seed(0)
        context = torch.randint(model.vocab_size, (_CONTEXT,), generator=generator)
        with torch.inference_mode():
            first = _vocabulary_states(model, layer, context[:0])
            others = _vocabulary_states(model, layer, context)
            states = model.states(sample, (layer,))[layer]
            spread = (states[:, 1:] - others[sample[:, 1:].to(others.device)]).flatten(0, 1)
            self._first = _Whitened(first, first.std(dim=0).clamp_min(1e-12).reciprocal().diag())
            self._others = _Whitened(others, _whitening(spread))

    def queries(
        self, observed: Float[Tensor, "prompt position d_model"]
    ) -> Float[Tensor, "prompt position rank"]:
        """One query a position."""
        first, others = self._first.apply(observed[:, :1]), self._others.apply(observed[:, 1:])
        return torch.cat([first, others], dim=1)

    def keys(self, position: int) -> Keys:
        """The codebook of the first position, or of the others."""
        return self._first.keys if position == 0 else self._others.keys


class _Whitened:
    """Nearest neighbour after a linear map: -|W(h - c)|^2 / 2, written as query . key + bias."""

    def __init__(self, codes: Tensor, map_: Tensor) -> None:
        self._mean, self._map = codes.mean(dim=0), map_.float()
        keys = self.apply(codes)
        self.keys = Keys(keys, -0.5 * keys.square().sum(dim=1))

    def apply(self, states: Tensor) -> Tensor:
        mapped: Tensor = (states.to(self._map.device).float() - self._mean) @ self._map.T
        return mapped


def _vocabulary_states(model: LanguageModel, layer: Layer, context: Tensor) -> Tensor:
    prefix = model.prefix(layer)
    if len(context):
        prefix.extend(context)
    chunks = torch.arange(model.vocab_size).split(prefix.max_candidates)
    return torch.cat([prefix.try_tokens(chunk).float() for chunk in chunks])


def _whitening(spread: Float[Tensor, "row d"]) -> Float[Tensor, "d d"]:
    """W with W S W^T = I for the (shrunk) covariance S of how states of the same token differ."""
    rows = spread.double()
    covariance = rows.T @ rows / len(rows)
    mean = covariance.diagonal().mean()
    values, vectors = torch.linalg.eigh(0.95 * covariance + 0.05 * mean * torch.eye(len(covariance)).to(rows))
    whitening: Tensor = (vectors * values.clamp_min(1e-12).rsqrt()).T.float()
    return whitening


def build_proposer(model: LanguageModel, layer: Layer, sample: Int[Tensor, "prompt position"]) -> Proposer:
    """The best proposer there is for a layer: a lens made for it, else the codebook."""
    info = find_lens(model, layer)
    if info is not None:
        return LensProposer(read_lens(info.path, model), token_features(model))
    return CodebookProposer(model, layer, sample)
