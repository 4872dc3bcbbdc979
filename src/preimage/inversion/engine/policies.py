"""Policies: in which order the vocabulary is tried at a position (Algorithms 2 and 3 of the paper).

A policy proposes every token at most once and, asked long enough, every token there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.inversion.engine.verifier import CandidatePrefix
from preimage.inversion.options import InvertOptions
from preimage.models import LanguageModel
from preimage.states import View

_SIZES = (8, 64, 512)  # of the first batches
_GROWTH = 4  # from one batch of ranked candidates to the next
_LOOKAHEAD = 8  # gradient proposals verified in one batch; at most so many steps are made in vain


def growing(order: Int[Tensor, " token"], largest: int) -> Iterator[Int[Tensor, " candidate"]]:
    """All tokens of an order, in batches: few at first, where the right one mostly is."""
    done = 0
    while done < len(order):
        size = min(largest, next((size for size in _SIZES if size > done), largest))
        yield order[done : done + size]
        done += size


@runtime_checkable
class Policy(Protocol):
    """Proposes candidates for one position."""

    def propose(self, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The next tokens to test, all of them untested; empty when there are none left."""


class RankedPolicy:
    """A given order at one position, in growing batches: a proposer's, or a random one (Algorithm 2)."""

    def __init__(
        self,
        order: Int[Tensor, " vocabulary"],
        first: int,
        largest: int,
        better: Callable[[], Int[Tensor, " vocabulary"] | None] | None = None,
    ) -> None:
        self._order, self._size, self._largest = order.cpu(), first, largest
        self._first, self._better = first, better  # an order worth asking for once the first batch failed

    def propose(self, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The next untested tokens of the order."""
        if self._better is not None and self._size > self._first:
            order, self._better = self._better(), None
            self._order = self._order if order is None else order
        self._order = self._order[untested[self._order]]
        batch = self._order[: min(self._size, self._largest)]
        self._size *= _GROWTH
        return batch


class InterruptedPolicy:
    """One policy, interrupted once by so many proposals of another."""

    def __init__(self, first: Policy, other: Policy, after: int, proposals: int) -> None:
        self._first, self._other = first, other
        self._after, self._proposals = after, proposals

    def propose(self, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The next proposals of whoever's turn it is."""
        if self._after > 0 or self._proposals <= 0:
            self._after -= 1
            return self._first.propose(untested)
        proposals = self._other.propose(untested)[: self._proposals]
        self._proposals -= max(1, len(proposals))
        return proposals


class GradientPolicy:
    """SIPIT's policy (Algorithm 3): descend on a continuous embedding, propose the nearest token.

    The descent never depends on how a test came out, only on what was proposed, so several proposals are
    verified in one batch without changing their order: 1, 2, 4, then 8 at a time.
    """

    def __init__(
        self,
        model: LanguageModel,
        prefix: CandidatePrefix,
        observed: Float[Tensor, " d"],
        observe: View,
        options: InvertOptions,
        generator: torch.Generator,
    ) -> None:
        self._prefix, self._observe, self._options = prefix, observe, options
        self._observed = observed.to(model.device)
        self._table = model.embedding_table
        self._squares = (self._table * self._table).sum(dim=1)
        start = int(torch.randint(model.vocab_size, (1,), generator=generator))
        self._proxy = self._table[start]
        self._proposed = 0
        self._ahead = 1

    def propose(self, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The next proposals of the descent; once patience is spent, tokens by nearness to the proxy."""
        patience = self._options.patience
        open_ = untested.to(self._table.device, copy=True)
        left = int(open_.sum())
        if patience is not None and self._proposed >= patience:
            nearest = self._nearness(open_).topk(min(left, self._prefix.max_candidates), largest=False)
            return nearest.indices.cpu()
        tokens: list[int] = []
        for _ in range(min(self._ahead, left)):
            self._descend()
            tokens.append(int(self._nearness(open_).argmin()))
            open_[tokens[-1]] = False
            self._proposed += 1
            if self._proposed % self._options.snap_every == 0 and len(tokens) < left:
                self._proxy = self._table[int(self._nearness(open_).argmin())]
        self._ahead = 1 if self._options.published_cost else min(2 * self._ahead, _LOOKAHEAD)
        return torch.tensor(tokens, dtype=torch.long)

    def _descend(self) -> None:
        """One step on 1/2 |F(e) - h_t|^2, its gradient's norm capped."""
        with torch.enable_grad():
            proxy = self._proxy.detach().requires_grad_(True)
            seen = self._observe(self._prefix.try_embeddings(proxy[None]))[0]
            loss = 0.5 * (seen - self._observed.to(seen.dtype)).square().sum()
            (gradient,) = torch.autograd.grad(loss, proxy)
        norm = float(torch.linalg.vector_norm(gradient))
        if norm > self._options.gradient_cap:
            gradient = gradient * (self._options.gradient_cap / norm)
        self._proxy = (proxy - self._options.learning_rate * gradient).detach()

    def _nearness(self, open_: Bool[Tensor, " vocabulary"]) -> Float[Tensor, " vocabulary"]:
        """|E_v - e|^2 - |e|^2 of every open token; a ranking of proposals, never a reported distance."""
        scores = self._squares - 2.0 * (self._table @ self._proxy)
        return scores.masked_fill(~open_, float("inf"))
