"""Scores: how likely each token is at each position, in the eyes of a proposer.

A score is a product of a query (one a position) and a key (one a token) plus a bias; scores of several
proposers add up. Nothing the size of positions times vocabulary is kept: scores are computed when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.devices import Aside, by_device
from preimage.distances import products

_SCORES = {"cpu": 2**22, "cuda": 2**30}  # scores held at once
_BLOCK = 256  # tokens of which the best is looked for first
_ENERGY = 0.97  # of the keys, in the directions of a first look
_FEW = 8  # likeliest tokens that are looked for everywhere; so many does a first look leave
_TURNED = 4096  # keys turned at once


@dataclass(frozen=True)
class Keys:
    """What queries are scored against. ``few``: so many first columns say nearly all, with the bias."""

    keys: Float[Tensor, "vocabulary rank"]
    bias: Float[Tensor, " vocabulary"]
    few: int = 0


class TurnedKeys:
    """Keys along their principal axes, for a cheap first look along a few of them; bias first of all."""

    def __init__(
        self, turned: Float[Tensor, "vocabulary rank_and_bias"], axes: Float[Tensor, "rank rank"], few: int
    ) -> None:
        self._axes = axes
        self.keys = Keys(turned.float(), torch.zeros(len(turned), device=turned.device), few)

    @classmethod
    def of(cls, keys: Float[Tensor, "vocabulary rank"], bias: Float[Tensor, " vocabulary"]) -> TurnedKeys:
        """Turn keys, and round them to what is kept of them, whether it is or not.

        Costs two products of keys with a matrix of rank x rank, in pieces that stay in a CPU's cache.
        """
        rank, mean = keys.shape[1], keys.mean(dim=0)
        spread = torch.zeros(rank, rank, dtype=torch.float64, device=keys.device)
        for piece in keys.split(_TURNED):
            centred = piece - mean
            spread += centred.T @ centred  # a piece in the keys' own precision, the sum in float64
        energy, axes = torch.linalg.eigh(spread)
        share = energy.flip(0).clamp_min(0).cumsum(dim=0) / energy.sum()
        axes = axes.flip(1).to(keys.dtype)
        turned = keys.new_empty(len(keys), 1 + rank)
        turned[:, 0] = bias.half()
        for piece, place in zip(keys.split(_TURNED), turned.split(_TURNED), strict=True):
            place[:, 1:] = (piece @ axes).half()
        return cls(turned, axes, 2 + int((share < _ENERGY).sum()))

    @classmethod
    def of_parts(cls, parts: dict[str, Tensor], shape: tuple[int, int], device: torch.device) -> TurnedKeys:
        """Keys as :meth:`parts` gave them; KeyError or ValueError where they are not of this shape."""
        turned, axes, few = (parts[name].to(device) for name in ("keys", "axes", "few"))
        if tuple(turned.shape) != shape or axes.shape != (shape[1] - 1, shape[1] - 1):
            raise ValueError("keys of another shape")
        return cls(turned, axes, min(shape[1], max(1, int(few))))

    def parts(self) -> dict[str, Tensor]:
        """What they are made of, to be kept."""
        few = torch.tensor([self.keys.few])
        return {
            "keys": self.keys.keys.half().cpu(),
            "axes": self._axes.float().cpu().contiguous(),
            "few": few,
        }

    def turn(self, queries: Float[Tensor, "*row rank"]) -> Float[Tensor, "*row rank_and_bias"]:
        """Queries to be scored against these keys."""
        return torch.cat([torch.ones_like(queries[..., :1]), queries @ self._axes], dim=-1)


@dataclass(frozen=True)
class Part:
    """Queries, and which of several sets of keys each is scored against."""

    queries: Float[Tensor, "row rank"]
    books: tuple[Keys, ...]
    book: Int[Tensor, " row"] | None = None  # None: the first, for all

    def at(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some vocabulary"]:
        """Scores of some positions."""
        queries = self.queries[rows]
        if self.book is None:
            return torch.addmm(self.books[0].bias, queries, self.books[0].keys.T)
        which = self.book[rows]
        scores = queries.new_empty(len(rows), len(self.books[0].bias))
        for number, book in enumerate(self.books):
            mine = (which == number).nonzero().flatten()
            if len(mine):
                scores[mine] = torch.addmm(book.bias, queries[mine], book.keys.T)
        return scores


@dataclass(frozen=True)
class Scores:
    """Scores of every token everywhere in some prompts; row p * length + t is position t of prompt p."""

    parts: tuple[Part, ...]
    length: int
    _aside: Aside = field(init=False, repr=False, compare=False)
    _kept: dict[int, list[int]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_aside", Aside(self.parts[0].queries.device))

    def at(self, rows: Int[Tensor, " some"]) -> Float[Tensor, "some vocabulary"]:
        """Scores of some rows, all parts added."""
        first, *others = self.parts
        total = first.at(rows)
        for part in others:
            total += part.at(rows)
        return total

    def best(self) -> Int[Tensor, "prompt position"]:
        """The first choice everywhere."""
        ids = [self.at(rows).argmax(dim=1) for rows in self.slices()]
        return torch.cat(ids).view(-1, self.length)

    def best_two(self) -> tuple[Int[Tensor, "prompt position"], Int[Tensor, "prompt position"]]:
        """The first and the second choice everywhere; of one token, that one twice."""
        tokens, _ = self.likeliest()
        return tokens[..., 0], tokens[..., min(1, tokens.shape[-1] - 1)]

    def likeliest(self) -> tuple[Int[Tensor, "prompt position few"], Float[Tensor, "prompt position few"]]:
        """The few likeliest tokens everywhere, the likeliest first, and their chances beside one another.

        Where scores tie, the lower number comes first.
        """
        with products("tf32" if self.parts[0].books[0].few else "ieee"):  # lenses are no finer than that
            pieces = [self._likeliest(rows) for rows in self.slices()]
        columns, scores = (
            torch.cat(side).unflatten(0, (-1, self.length)) for side in zip(*pieces, strict=True)
        )
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        return columns.gather(-1, order), scores.softmax(dim=-1)

    def _likeliest(
        self, rows: Int[Tensor, " some"]
    ) -> tuple[Int[Tensor, "some few"], Float[Tensor, "some few"]]:
        """A few tokens of every row, by number, and their scores."""
        (book, *_), few = self.parts[0].books, self.parts[0].books[0].few
        if not few or len(self.parts) > 1:
            scores = self.at(rows)
            columns = _best(scores, _FEW)
            return columns, scores.gather(1, columns)
        queries = self.parts[0].queries[rows]
        columns = _best(queries[:, :few] @ book.keys[:, :few].T, _FEW)
        return columns, (book.keys[columns] @ queries[:, :, None])[..., 0] + book.bias[columns]

    def first_choice(self, prompt: int, position: int) -> tuple[int, float]:
        """The most likely token at one position, and how likely these scores make it."""
        likely, token = self.at(self.row(prompt, position))[0].softmax(dim=0).max(dim=0)
        return int(token), float(likely)

    def order(self, prompt: int, position: int) -> Int[Tensor, " vocabulary"]:
        """Every token at one position, most likely first."""
        return self.at(self.row(prompt, position))[0].argsort(descending=True)

    def top(self, prompt: int, position: int, count: int) -> list[int]:
        """The ``count`` most likely tokens at one position, most likely first."""
        kept = self._kept.get(prompt * self.length + position, [])
        if len(kept) >= count:
            return kept[:count]
        with self._aside.work():
            scores = self.at(self.row(prompt, position))[0]
            return scores.topk(min(count, len(scores))).indices.tolist()

    def keep_top(self, places: Sequence[tuple[int, int]], count: int) -> None:
        """Find the ``count`` most likely tokens at many positions at once, for :meth:`top` to give."""
        numbers = {prompt * self.length + position for prompt, position in places}
        fresh = sorted(number for number in numbers if len(self._kept.get(number, [])) < count)
        if not fresh:
            return
        with self._aside.work():
            for rows in torch.tensor(fresh, dtype=torch.long).split(self._size()):
                scores = self.at(rows.to(self.parts[0].queries.device))
                best = scores.topk(min(count, scores.shape[1])).indices.tolist()
                self._kept.update(zip(rows.tolist(), best, strict=True))

    def slices(self) -> Iterator[Int[Tensor, " some"]]:
        """All rows, in pieces whose scores fit in memory."""
        queries = self.parts[0].queries
        yield from torch.arange(len(queries), device=queries.device).split(self._size())

    def _size(self) -> int:
        """Rows whose scores fit in memory."""
        first = self.parts[0]
        return max(64, by_device(_SCORES, first.queries.device) // len(first.books[0].bias))

    def row(self, prompt: int, position: int) -> Int[Tensor, " one"]:
        """The row of one position."""
        return torch.tensor([prompt * self.length + position], device=self.parts[0].queries.device)


def _best(scores: Float[Tensor, "some vocabulary"], count: int) -> Int[Tensor, "some few"]:
    """The ``count`` best tokens of each row, by number; they are in so many blocks with the best peaks."""
    size = scores.shape[1]
    whole = size - size % _BLOCK
    columns = torch.arange(size, device=scores.device).expand_as(scores)
    if whole > count * _BLOCK:
        peaks = scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=2)
        inside = columns[:, :whole].unflatten(1, (-1, _BLOCK))
        best = peaks.topk(count).indices[..., None].expand(-1, -1, _BLOCK)
        columns = torch.cat([inside.gather(1, best).flatten(1), columns[:, whole:]], dim=1)
        scores = scores.gather(1, columns)
    chosen = scores.topk(min(count, size)).indices
    return columns.gather(1, chosen).sort(dim=1).values
