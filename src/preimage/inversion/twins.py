"""Tokens that could be mistaken for one another: bit-identical embeddings, and nearest ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from preimage.distances import same_rows
from preimage.models import LanguageModel

_NEAREST = 16
_NEAR = 1e-3  # relative distance of embeddings below which two tokens are looked at together
_PROJECTIONS = 4
Groups: TypeAlias = dict[int, tuple[int, ...]]
_known: weakref.WeakKeyDictionary[LanguageModel, tuple[Groups, Groups]]
_known = weakref.WeakKeyDictionary()


class Rivals:
    """For a token: its twins, and the untested tokens whose embeddings are nearest to its own."""

    def __init__(self, model: LanguageModel) -> None:
        self.vocab_size = model.vocab_size
        self._table = model.embedding_table
        if model not in _known:
            _known[model] = find_twins(self._table), find_near_twins(self._table)
        self._twins, self._near = _known[model]

    def twins(self, token: int) -> tuple[int, ...]:
        """Every other token whose embedding is the same to the bit: no state can tell them apart."""
        group = self._twins.get(token)
        return () if group is None else tuple(other for other in group if other != token)

    def near(self, token: int) -> tuple[int, ...]:
        """Every token whose embedding is nearly the same, but not to the bit."""
        group = self._near.get(token)
        return () if group is None else tuple(other for other in group if other not in self.twins(token))

    def unmistakable(self, ids: Sequence[int]) -> bool:
        """Whether none of these tokens has a twin or a near one."""
        return self._near.keys().isdisjoint(ids) and self._twins.keys().isdisjoint(ids)

    def of(self, token: int, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The twins and the nearest tokens that were not tested yet."""
        gap = (self._table - self._table[token]).square().sum(dim=1)
        gap = gap.masked_fill(~untested.to(gap.device), float("inf"))
        count = min(max(_NEAREST, len(self.twins(token))), int(untested.sum()))
        return gap.topk(count, largest=False).indices.cpu()


@torch.inference_mode()
def find_near_twins(table: Tensor) -> Groups:
    """Tokens within a relative distance of 1e-3 of each token, itself left out.

    What is near is near in every projection: rows are sorted by one random projection, compared with the
    rows that follow while these can still be near, and a few more projections leave almost nothing to
    check exactly. Under a second for 50,000 tokens; all pairs would be a thousand times the work.
    """
    rows = table.float()
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(rows.shape[1], _PROJECTIONS, generator=generator).to(rows)
    shadows = rows @ torch.nn.functional.normalize(directions, dim=0)
    order = shadows[:, 0].argsort()
    shadows, reach = shadows[order], _NEAR * rows.norm(dim=1)[order]
    found: dict[int, list[int]] = {}
    for offset in range(1, len(rows)):
        gap = (shadows[offset:] - shadows[:-offset]).abs()
        limit = torch.maximum(reach[offset:], reach[:-offset])
        if not bool((gap[:, 0] <= limit).any()):
            break
        for hit in (gap <= limit[:, None]).all(dim=1).nonzero().flatten().tolist():
            one, other = int(order[hit]), int(order[hit + offset])
            if float((rows[one] - rows[other]).norm()) <= float(limit[hit]):
                found.setdefault(one, []).append(other)
                found.setdefault(other, []).append(one)
    return {token: tuple(sorted(others)) for token, others in found.items()}


def find_twins(table: Tensor) -> Groups:
    """Groups of bit-identical rows."""
    groups: dict[int, list[int]] = {}
    for index, first in enumerate(same_rows(table).tolist()):
        groups.setdefault(first, []).append(index)
    return {i: tuple(group) for group in groups.values() if len(group) > 1 for i in group}
