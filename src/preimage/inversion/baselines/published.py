"""A prefix without a cache: what SIPIT costs as published.

Every trial runs the whole prefix again, one candidate at a time, through all blocks. The numbers it gives
are those of the cached prefix up to noise; only the cost differs.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.models import LanguageModel
from preimage.observations import Tap


class UncachedPrefix:
    """The interface of a prefix, at the published cost."""

    max_candidates = 1

    def __init__(self, model: LanguageModel, tap: Tap) -> None:
        self._model, self._tap = model, tap
        self._ids = torch.empty(0, dtype=torch.long)

    def extend(self, ids: Int[Tensor, " position"]) -> Float[Tensor, "position d_model"]:
        """Append tokens and return their states."""
        start = len(self._ids)
        self._ids = torch.cat([self._ids, ids.cpu()])
        with torch.no_grad():
            return self._run(self._model.embed(self._ids))[start:]

    def crop(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        self._ids = self._ids[:length]

    def try_tokens(self, ids: Int[Tensor, " candidate"]) -> Float[Tensor, "candidate d_model"]:
        """F(v; prefix, t) for each candidate v, one full pass each."""
        with torch.no_grad():
            return self.try_embeddings(self._model.embed(ids))

    def try_embeddings(
        self, embeddings: Float[Tensor, "candidate d_embedding"]
    ) -> Float[Tensor, "candidate d_model"]:
        """The same for continuous embeddings; gradients flow to them."""
        before = self._model.embed(self._ids)
        return torch.stack([self._run(torch.cat([before, row[None]]))[-1] for row in embeddings])

    def _run(self, embeddings: Tensor) -> Tensor:
        taps = dict.fromkeys((self._tap, "final"))  # "final" makes all blocks run
        return self._model.run(embeddings=embeddings[None], layers=tuple(taps))[self._tap][0]
