"""Along the tangent: which tokens would move a state towards what was observed.

The state at a position is a smooth function of the embedding there. Its derivative at a token that does not
fit, one pass back, scores every other token by how far it would lead along what is missing; what several
such tokens agree on says more. Behind verified tokens that finds the right one where no proposer knows the
layer; near the top of a trained model it says little. Where blocks can be undone, all this happens at the
lowest layer that can be reached: a state tells more of its token there, and only blocks below it are run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.devices import by_device
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.expectation import shared_tokens
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.proposers.peeling import lowered, lowest_layer
from preimage.models import LanguageModel, Prefix

log = logging.getLogger(__name__)

LEADING = 64  # tokens that are worth a look, of all
_SEEN_FROM = {"cpu": 32, "cuda": 256}  # tokens of which the derivative is taken
# tokens whose states are compared, of those it leads to; more where blocks were undone and none is near
_COMPARED = {"cpu": (64, 512, 4096), "cuda": (512, 4096, 2**31)}
_MORE = 4  # times as many tokens, where none is near
_NEAR = 0.5  # of how far other tokens are: one nearer than this is taken for the right one
_KEPT = 3  # proposals in a row that are right, after which nobody has to be led

# From states, which way they would have to move, and how far they are off.
Missing = Callable[[Tensor], Tensor]


def tangent_order(
    model: LanguageModel, prefix: Prefix, verifier: Verifier, target: Target, token: int
) -> Int[Tensor, " vocabulary"] | None:
    """Every token, the most promising first, as seen from one that does not fit; None without a gradient."""
    seen = _leading(
        model, prefix, [token], lambda states: target.missing(verifier.observe(states)), verifier.observe
    )
    return None if seen is None else seen.order


class _Seen(NamedTuple):
    """What some tokens lead to, and what is missing at each of them."""

    order: Int[Tensor, " vocabulary"]
    missing: Float[Tensor, "token d"]


def _leading(
    model: LanguageModel,
    prefix: Prefix,
    tokens: Sequence[int],
    missing: Missing,
    observe: Callable[[Tensor], Tensor] = lambda states: states,
) -> _Seen | None:
    """Every token, the most promising first, as some see it that do not fit."""
    table = model.embedding_table
    try:
        with torch.inference_mode(False), torch.enable_grad():
            proxies = table[torch.tensor(tokens, device=table.device)].clone().requires_grad_(True)
            states = prefix.try_embeddings(proxies)
            short = missing(states.detach())
            (gradients,) = torch.autograd.grad((observe(states) * short.to(states)).sum(), proxies)
    except (RuntimeError, NotImplementedError) as error:  # weights in few bits, or of a kind of their own
        log.info("%s has no gradient: %s", model.name, error)
        return None
    alike = gradients / gradients.norm(dim=1, keepdim=True).clamp_min(torch.finfo(gradients.dtype).tiny)
    return _Seen((table @ alike.sum(dim=0)).argsort(descending=True).cpu(), short)


class Descent:
    """One prompt's states as low as blocks can be undone, and what leads to its tokens there."""

    def __init__(
        self, model: LanguageModel, verifier: Verifier, observed: Float[Tensor, "position d"], target: Target
    ) -> None:
        self._model, self._verifier, self._target = model, verifier, target
        tap = verifier.tap
        low = lowest_layer(model, tap) if isinstance(tap, int) and verifier.plain else tap
        self._states: Tensor | None = None
        if isinstance(tap, int) and isinstance(low, int) and low < tap:
            valid = torch.ones(1, len(observed), dtype=torch.bool, device=model.device)
            self._states = lowered(model, observed[None].to(model.device), tap, low, valid)[0]
        self._prefix, self._held = model.prefix(low), list[int]()
        self._draw = torch.Generator().manual_seed(0)

    def order(self, before: Sequence[int], refused: Sequence[int]) -> Int[Tensor, " vocabulary"] | None:
        """Every token behind some tokens, the most promising first; of those refused, the nearest first."""
        seen = self._look(before, refused)
        return None if seen is None else seen[0]

    def read_on(self, ids: Int[Tensor, " position"], start: int, budget: Budget) -> Int[Tensor, " position"]:
        """A proposal with its tokens from a position on found here, as long as it is wrong and others fit."""
        found, right = ids.tolist(), 0
        for at in range(start, len(found)):
            budget.check(0)
            seen = self._look(found[:at], [found[at]])
            if seen is None:
                break
            order, away, usual = seen
            right = right + 1 if away[0] <= _NEAR * usual and int(order[0]) == found[at] else 0
            if right == _KEPT or not away[0] <= _NEAR * usual:
                break
            found[at] = int(order[0])
        return torch.tensor(found, dtype=ids.dtype)

    def _look(
        self, before: Sequence[int], refused: Sequence[int]
    ) -> tuple[Int[Tensor, " vocabulary"], list[float], float] | None:
        """Every token, the first few by how far they are, these distances, and how far others usually are."""
        shared = shared_tokens(list(before), self._held)
        self._prefix.crop(shared)
        if shared < len(before):
            self._prefix.extend(torch.tensor(before[shared:]))
        self._held = list(before)
        count = by_device(_SEEN_FROM, self._model.device)
        ladder = by_device(_COMPARED, self._model.device)
        if self._states is None:
            return self._look_from(refused, count, ladder[:1])
        seen = self._look_from(refused, count, ladder[:2])
        if seen is None or seen[1][0] <= _NEAR * seen[2]:
            return seen
        return self._look_from(refused, _MORE * count, ladder)

    def _look_from(
        self, refused: Sequence[int], count: int, ladder: Sequence[int]
    ) -> tuple[Int[Tensor, " vocabulary"], list[float], float] | None:
        """The same from so many tokens, and with so many compared, round after round, until one is near."""
        model, at = self._model, len(self._held)
        some = list(refused[:count])
        some += torch.randint(model.vocab_size, (count - len(some),), generator=self._draw).tolist()
        seen = _leading(model, self._prefix, some, lambda states: self._missing(states, at), self._observe)
        if seen is None:
            return None
        usual = float(seen.missing.norm(dim=1).median())
        order = torch.cat([torch.tensor(some[:1]), seen.order[seen.order != some[0]]])
        away = torch.empty(0)
        for size in ladder:
            fresh = order[len(away) : size]
            parts = fresh.split(self._prefix.max_candidates) if len(fresh) else ()
            tried = [self._missing(self._prefix.try_tokens(part), at).norm(dim=1).cpu() for part in parts]
            away = torch.cat([away, *(part.float() for part in tried)])
            if float(away.min()) <= _NEAR * usual:
                break
        nearest = away.argsort()
        return torch.cat([order[nearest], order[len(away) :]]), away[nearest].tolist(), usual

    def _observe(self, states: Tensor) -> Tensor:
        return states if self._states is not None else self._verifier.observe(states)

    def _missing(self, states: Float[Tensor, "token d"], at: int) -> Float[Tensor, "token d"]:
        if self._states is not None:
            return self._states[at] - states.float()
        return self._target[at].missing(self._verifier.observe(states))


def merged(*orders: Int[Tensor, " token"] | None) -> Int[Tensor, " token"] | None:
    """Several orders of the same tokens as one: each token where it comes soonest, the first order first."""
    given = [order for order in orders if order is not None]
    if len(given) < 2:
        return given[0] if given else None
    each = torch.arange(len(given[0]))
    ranks = torch.stack([torch.empty_like(order).scatter_(0, order, each) for order in given])
    best = len(given) * ranks + torch.arange(len(given))[:, None]
    return best.amin(dim=0).argsort()
