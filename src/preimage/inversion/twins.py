"""Tokens that could be mistaken for one another: bit-identical embeddings, and nearest ones."""

from __future__ import annotations

import weakref

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from preimage.models import LanguageModel

_NEAREST = 16
_known: weakref.WeakKeyDictionary[LanguageModel, dict[int, tuple[int, ...]]]
_known = weakref.WeakKeyDictionary()


class Rivals:
    """For a token: its twins, and the untested tokens whose embeddings are nearest to its own."""

    def __init__(self, model: LanguageModel) -> None:
        self.vocab_size = model.vocab_size
        self._table = model.embedding_table
        if model not in _known:
            _known[model] = find_twins(self._table)
        self._twins = _known[model]

    def twins(self, token: int) -> tuple[int, ...]:
        """Every other token whose embedding is the same to the bit: no state can tell them apart."""
        return tuple(other for other in self._twins.get(token, ()) if other != token)

    def of(self, token: int, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The twins and the nearest tokens that were not tested yet."""
        gap = (self._table - self._table[token]).square().sum(dim=1)
        gap = gap.masked_fill(~untested.to(gap.device), float("inf"))
        count = min(max(_NEAREST, len(self.twins(token))), int(untested.sum()))
        return gap.topk(count, largest=False).indices.cpu()


def find_twins(table: Tensor) -> dict[int, tuple[int, ...]]:
    """Groups of bit-identical rows, by hashing row bytes; -0.0 counts as 0.0."""
    rows = (table + 0.0).cpu().contiguous()
    width = rows.shape[1] * rows.element_size()
    data = rows.view(torch.uint8).reshape(len(rows), width).numpy()
    groups: dict[bytes, list[int]] = {}
    for index in range(len(rows)):
        groups.setdefault(data[index].tobytes(), []).append(index)
    return {i: tuple(group) for group in groups.values() if len(group) > 1 for i in group}
