"""Readings: how likely each token is at each position, in the eyes of a proposer.

A score is a product of a query (one a position) and a key (one a token) plus a bias; readings of several
proposers add up. Nothing the size of positions times vocabulary is kept: scores are computed when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

_SCORES = {"cpu": 2**22, "cuda": 2**30}  # scores held at once
_BLOCK = 256  # tokens of which the best is looked for first


@dataclass(frozen=True)
class Keys:
    """What queries are scored against."""

    keys: Float[Tensor, "vocabulary rank"]
    bias: Float[Tensor, " vocabulary"]


@dataclass(frozen=True)
class Part:
    """Queries, and which of several sets of keys each is scored against."""

    queries: Float[Tensor, "row rank"]
    books: tuple[Keys, ...]
    book: Int[Tensor, " row"] | None = None  # None: the first, for all

    def scores(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some vocabulary"]:
        """Scores of some positions."""
        queries = self.queries[rows]
        if self.book is None:
            return torch.addmm(self.books[0].bias, queries, self.books[0].keys.T)
        which = self.book[rows]
        found = queries.new_empty(len(rows), len(self.books[0].bias))
        for number, book in enumerate(self.books):
            mine = (which == number).nonzero().flatten()
            if len(mine):
                found[mine] = torch.addmm(book.bias, queries[mine], book.keys.T)
        return found


@dataclass(frozen=True)
class Reading:
    """Scores of every token everywhere in some prompts; row p * length + t is position t of prompt p."""

    parts: tuple[Part, ...]
    length: int

    def scores(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some vocabulary"]:
        """Scores of some rows, all parts added."""
        first, *others = self.parts
        total = first.scores(rows)
        for part in others:
            total += part.scores(rows)
        return total

    def best(self) -> Int[Tensor, "prompt position"]:
        """The first choice everywhere."""
        found = [self.scores(rows).argmax(dim=1) for rows in self.slices()]
        return torch.cat(found).view(-1, self.length)

    def best_two(self) -> tuple[Int[Tensor, "prompt position"], Int[Tensor, "prompt position"]]:
        """The first and the second choice everywhere; of one token, that one twice."""
        found = [_best_two(self.scores(rows)) for rows in self.slices()]
        first, second = (torch.cat(column).view(-1, self.length) for column in zip(*found, strict=True))
        return first, second

    def order(self, prompt: int, position: int) -> Int[Tensor, " vocabulary"]:
        """Every token at one position, most likely first."""
        return self.scores(self._row(prompt, position))[0].argsort(descending=True)

    def top(self, prompt: int, position: int, count: int) -> list[int]:
        """The ``count`` most likely tokens at one position, most likely first."""
        scores = self.scores(self._row(prompt, position))[0]
        chosen: list[int] = scores.topk(min(count, len(scores))).indices.tolist()
        return chosen

    def slices(self) -> Iterator[Int[Tensor, " some"]]:
        """All rows, in pieces whose scores fit in memory."""
        queries = self.parts[0].queries
        kind = queries.device.type
        size = _SCORES.get(kind, _SCORES["cpu"]) // len(self.parts[0].books[0].bias)
        yield from torch.arange(len(queries), device=queries.device).split(max(64, size))

    def _row(self, prompt: int, position: int) -> Tensor:
        return torch.tensor([prompt * self.length + position], device=self.parts[0].queries.device)


def _best_two(
    scores: Float[Tensor, "some vocabulary"],
) -> tuple[Int[Tensor, " some"], Int[Tensor, " some"]]:
    """The best token of each row and the next, looked for in the two best blocks alone."""
    size = scores.shape[1]
    whole = size - size % _BLOCK
    columns = torch.arange(size, device=scores.device).expand_as(scores)
    if whole > 2 * _BLOCK:
        best = scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=2).topk(2).indices.sort(dim=1).values
        inside = columns[:, :whole].unflatten(1, (-1, _BLOCK))
        chosen = inside.gather(1, best[..., None].expand(-1, -1, _BLOCK)).flatten(1)
        columns = torch.cat([chosen, columns[:, whole:]], dim=1)
        scores = scores.gather(1, columns)
    first = scores.argmax(dim=1, keepdim=True)
    second = scores.scatter(1, first, -torch.inf).argmax(dim=1, keepdim=True)
    return columns.gather(1, first)[:, 0], columns.gather(1, second)[:, 0]
