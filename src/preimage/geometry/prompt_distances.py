"""How far apart prompts are: the places where they differ, or the edits between them. Both exact."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from jaxtyping import Int
from torch import Tensor


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
        some._ids, some.lengths = self._ids[rows], self.lengths[rows]
        return some

    def of(self, first: Int[Tensor, " pair"], second: Int[Tensor, " pair"]) -> Int[Tensor, " pair"]:
        """The distances of given pairs."""
        one, other = self._ids[first], self._ids[second]
        if self.name == "hamming":
            return (one != other).sum(dim=1)
        return _levenshtein(one, other, self.lengths[first], self.lengths[second])

    def table(self, rows: Int[Tensor, " row"], columns: Int[Tensor, " column"]) -> Int[Tensor, "row column"]:
        """The distances of every row to every column."""
        if self.name == "hamming":
            found = torch.zeros(len(rows), len(columns), dtype=torch.int16, device=self._ids.device)
            for one, other in zip(self._ids[rows].T, self._ids[columns].T, strict=True):
                found += one[:, None] != other[None, :]
            return found.long()
        first = rows.repeat_interleave(len(columns))
        return self.of(first, columns.repeat(len(rows))).view(len(rows), len(columns))


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
