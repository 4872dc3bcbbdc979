"""Tokens that could be mistaken for one another: bit-identical embeddings, and near ones."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from preimage.distances import row_distances
from preimage.models import LanguageModel

_NEAREST = 16
# Relative distance of what enters block 1 below which two tokens are always looked at together. Tokens
# further apart than this, where others are FAR radii away, fit only if the model brings them together.
NEAR = 2**-3
# Dimensions of the first look, at least, and as a part of the width: in fewer, tokens that have nothing in
# common look near.
_PROJECTIONS, _OF_WIDTH = 32, 16
_CHUNK = 4096  # tokens embedded at once
_TOGETHER = 64  # tokens compared with all others at once
_BLOCK = 256  # others of which the nearest is looked at first
_known: weakref.WeakKeyDictionary[LanguageModel, tuple[int, Lookalikes]]  # by edition
_known = weakref.WeakKeyDictionary()


def lookalikes_of(model: LanguageModel) -> Lookalikes:
    """The lookalikes of a model's tokens, kept for a model in memory until it is changed."""
    edition, lookalikes = _known.get(model, (-1, None))
    if lookalikes is None or edition != model.edition:
        lookalikes = Lookalikes(model)
        _known[model] = model.edition, lookalikes
    return lookalikes


class Lookalikes:
    """For a token: its twins (bit-identical embeddings), and tokens whose embeddings are near its own.

    Distances are between what enters block 1, the same for all models whatever follows their embedding table.
    A projection never makes a distance longer, so what is near is near in a few dimensions too: a product
    of a few tokens with all others there leaves almost nothing to look at closely.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.vocab_size = model.vocab_size
        self._model = weakref.ref(model)  # or it would never be forgotten
        self._table = model.embedding_table
        generator = torch.Generator().manual_seed(0)
        parts: list[Tensor] = []
        lengths: list[Tensor] = []
        basis: Tensor | None = None
        for ids in torch.arange(self.vocab_size).split(_CHUNK):
            rows = self._inputs(ids)
            if basis is None:
                few = min(max(_PROJECTIONS, rows.shape[1] // _OF_WIDTH), rows.shape[1])
                basis = torch.linalg.qr(torch.randn(rows.shape[1], few, generator=generator))[0].to(rows)
            parts.append(rows @ basis)
            lengths.append(rows.norm(dim=1))
        self._norms = torch.cat(lengths)
        rest = -self.vocab_size % _BLOCK
        self._shadows = pad(torch.cat(parts), (0, 0, 0, rest))
        self._squares = self._shadows.square().sum(dim=1)
        self._squares[self.vocab_size :] = torch.inf  # to fill the last block; near to nothing
        # of tokens that were asked for: twins; near ones, and how near
        self._near: dict[int, tuple[tuple[int, ...], dict[int, float]]] = {}
        self._mistakable: set[int] = set()  # those of them that have any
        self._twinned: set[int] = set()  # those that have twins

    def twins(self, token: int) -> tuple[int, ...]:
        """Every other token whose embedding is the same to the bit: no state can tell them apart."""
        return self._of(token)[0]

    def near(self, token: int) -> Mapping[int, float]:
        """Every token whose embedding is nearly the same, but not to the bit, and how near it is.

        1 is as far off as a near one may be.
        """
        return self._of(token)[1]

    def _of(self, token: int) -> tuple[tuple[int, ...], dict[int, float]]:
        if token not in self._near:
            self.look_up([token])
        return self._near[token]

    def mistakable(self, ids: Sequence[int]) -> set[int]:
        """Those of some tokens that have a twin or a near one."""
        self.look_up(ids)
        return self._mistakable.intersection(ids)

    def unmistakable(self, ids: Sequence[int]) -> bool:
        """Whether none of these tokens has a twin or a near one."""
        return not self.mistakable(ids)

    def without_twins(self, ids: Sequence[int]) -> bool:
        """Whether none of these tokens has a twin."""
        self.look_up(ids)
        return self._twinned.isdisjoint(ids)

    def all_far(self, token: int, others: Mapping[int, float], far: float) -> bool:
        """Whether what was tried beside a token shows that nothing else lies near: ``others`` by distance.

        Tokens of almost the same embedding are all tried, and say nothing of the rest where they lie near:
        only where that goes on as it began, so that a token of any other embedding may lie near as well.
        """
        twins, near = self.twins(token), self.near(token)
        unlike = False
        for other, away in others.items():
            if other == token or other in twins:
                continue
            unlike = unlike or other not in near
            if not away >= far * near.get(other, 1.0):
                return False
        return unlike

    def look_up(self, ids: Sequence[int]) -> None:
        """Find the twins and near tokens of many tokens at once."""
        fresh = sorted({token for token in ids if token not in self._near})
        for start in range(0, len(fresh), _TOGETHER):
            self._find(torch.tensor(fresh[start : start + _TOGETHER]))

    def rivals(self, token: int, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The near tokens and the nearest by embedding that were not tested yet."""
        gap = (self._table - self._table[token]).square().sum(dim=1)
        gap[list(self.near(token))] = 0.0  # and some that are not near, to compare with
        gap = gap.masked_fill(~untested.to(gap.device), float("inf"))
        count = min(_NEAREST + len(self.twins(token)) + len(self.near(token)), int(untested.sum()))
        return gap.topk(count, largest=False).indices.cpu()

    @torch.inference_mode()
    def _find(self, ids: Int[Tensor, " token"]) -> None:
        reach = NEAR * self._norms[ids]
        found: dict[int, tuple[list[int], dict[int, float]]] = {token: ([], {}) for token in ids.tolist()}
        for part in self._hits(ids, reach).split(_CHUNK):
            rows, others = part.unbind(dim=1)
            own = ids[rows]
            same = (self._table[others] == self._table[own]).all(dim=1).cpu()
            theirs, ours = self._inputs(torch.cat([others, own])).chunk(2)
            gaps = row_distances(theirs, ours).cpu() / reach[rows].cpu()
            for token, other, is_twin, gap in zip(
                own.tolist(), others.tolist(), same.tolist(), gaps.tolist(), strict=True
            ):
                if is_twin:
                    found[token][0].append(other)
                elif gap <= 1:
                    found[token][1][other] = gap
        self._near.update({token: (tuple(twins), near) for token, (twins, near) in found.items()})
        self._mistakable |= {token for token, (twins, near) in found.items() if twins or near}
        self._twinned |= {token for token, (twins, _) in found.items() if twins}

    def _hits(
        self, ids: Int[Tensor, " token"], reach: Float[Tensor, " token"]
    ) -> Int[Tensor, "pair token_and_other"]:
        """Which of these tokens (by row) may be near which other, as far as a few dimensions show."""
        squares = self._squares[ids]
        apart = torch.addmm(self._squares[None], self._shadows[ids], self._shadows.T, alpha=-2.0)
        # what rounding may do to this difference of squares
        limit = reach.square() - squares + 1e-4 * (squares + reach.square())
        blocks = apart.unflatten(1, (-1, _BLOCK))
        rows, block = (blocks.amin(dim=2) <= limit[:, None]).nonzero().unbind(dim=1)
        which, inside = (blocks[rows, block] <= limit[rows, None]).nonzero().unbind(dim=1)
        pairs = torch.stack([rows[which], block[which] * _BLOCK + inside], dim=1).cpu()
        return pairs[pairs[:, 1] != ids[pairs[:, 0]]]

    def _inputs(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token d_model"]:
        """What enters block 1 for each token, at the first position; no block runs, and none is counted."""
        model = self._model()
        assert model is not None, "the model is gone"
        counted = model.forward_tokens
        states = model.states(ids[:, None], (0,))[0][:, 0].float()
        model.forward_tokens = counted
        return states
