"""How far apart prompts are: the places where they differ, or the edits between them. Both exact."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import products

_WIDTH = 1024  # buckets that tokens are hashed to


class PromptDistances:
    """Token Hamming distance where all prompts are equally long, else Levenshtein's."""

    def __init__(self, ids: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        self.lengths = torch.tensor([len(row) for row in ids], device=device)
        self.name = "hamming" if len(set(self.lengths.tolist())) == 1 else "levenshtein"
        self.largest = int(self.lengths.max())
        padded = [[*row, *[-1] * (self.largest - len(row))] for row in ids]
        self._ids = torch.tensor(padded, dtype=torch.int32, device=device)

    def subset(self, rows: Int[Tensor, " row"]) -> PromptDistances:
        """Those of some of the prompts, by the same measure."""
        some = copy(self)
        some.__dict__.pop("_shared", None)
        some._ids, some.lengths = self._ids[rows], self.lengths[rows]
        return some

    def of(self, first: Int[Tensor, " pair"], second: Int[Tensor, " pair"]) -> Int[Tensor, " pair"]:
        """The distances of given pairs."""
        one, other = self._ids[first], self._ids[second]
        if self.name == "hamming":
            return (one != other).sum(dim=1)
        return _levenshtein(one, other, self.lengths[first], self.lengths[second])

    def at_least(
        self, rows: Int[Tensor, " row"], columns: Int[Tensor, " column"]
    ) -> Float[Tensor, "row column"]:
        """Whole numbers that the distances of every row to every column are not below, by one product.

        At most as many tokens stay in their place, or are kept at all, as two prompts have in common; hashed
        tokens have no fewer in common. For edits that is the sum over buckets of min(a, b) <= sqrt(a b),
        where a and b count each prompt's tokens of the bucket.
        """
        with products("ieee"):
            common = self._shared[rows] @ self._shared[columns].T
        long = torch.maximum(self.lengths[rows][:, None], self.lengths[columns][None])
        short = torch.minimum(self.lengths[rows][:, None], self.lengths[columns][None])
        least = (long - common - 1e-3 * (1 + common)).ceil()
        return torch.maximum(least, (long - short).to(least.dtype))

    @cached_property
    def _shared(self) -> Float[Tensor, "prompt bucket"]:
        """What :meth:`at_least` multiplies: tokens by place and bucket, or roots of counts by bucket."""
        count, places = self._ids.shape
        each = max(8, _WIDTH // places) if self.name == "hamming" else _WIDTH
        bucket = self._ids.long() * 2654435761 % 2**32 * each // 2**32  # multiplicative hashing
        if self.name == "hamming":
            bucket += torch.arange(places, device=bucket.device) * each
            return torch.zeros(count, places * each, device=bucket.device).scatter_(1, bucket, 1.0)
        known = (self._ids >= 0).float()
        return torch.zeros(count, each, device=bucket.device).scatter_add_(1, bucket, known).sqrt_()


def _levenshtein(
    one: Int[Tensor, "pair position"],
    other: Int[Tensor, "pair position"],
    lengths: Int[Tensor, " pair"],
    others: Int[Tensor, " pair"],
) -> Int[Tensor, " pair"]:
    """Fewest insertions, deletions and substitutions, all pairs at once, one row of the table a step.

    Along a row an insertion costs 1 more for each place, so that the row is a running minimum once j is
    taken off: t[j] = j + min over k <= j of (t'[k] - k).
    """
    width = other.shape[1]
    along = torch.arange(width + 1, device=one.device)
    row = along.expand(len(one), -1)
    result = torch.where(lengths == 0, others, 0)
    for step in range(1, one.shape[1] + 1):
        differs = (one[:, step - 1, None] != other).long()
        best = torch.minimum(row[:, 1:] + 1, row[:, :-1] + differs)
        start = torch.full((len(one), 1), step, device=one.device)
        row = (torch.cat([start, best], dim=1) - along).cummin(dim=1).values + along
        result = torch.where(lengths == step, row.gather(1, others[:, None])[:, 0], result)
    return result
