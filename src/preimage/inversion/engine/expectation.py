"""What the model itself expects next behind given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.models import LanguageModel, Prefix


class Expectation:
    """Log probabilities of every next token, behind tokens that mostly grow by a few from call to call."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._prefix: Prefix | None = None if model.unembedding is None else model.prefix("final")
        self._held: list[int] = []
        self._last: Tensor | None = None

    def behind(self, ids: Sequence[int]) -> Float[Tensor, " vocabulary"] | None:
        """The expectation behind these tokens; None without tokens, or without an LM head."""
        table = self._model.unembedding
        if self._prefix is None or table is None or not ids:
            return None
        shared = shared_tokens(ids, self._held)
        if shared < len(ids) or shared < len(self._held) or self._last is None:
            shared = min(shared, len(ids) - 1)  # the last token is run again for its state
            self._prefix.crop(shared)
            self._last = self._prefix.extend(torch.tensor(ids[shared:]))[-1]
            self._held = list(ids)
        return next_token(table, self._last)


def next_token(
    table: Float[Tensor, "vocabulary d"], state: Float[Tensor, " d"]
) -> Float[Tensor, " vocabulary"]:
    """Log probabilities of the next token by the LM head's matrix, behind what leaves the last norm."""
    return (table @ state.to(table)).float().log_softmax(dim=0)


_first: WeakKeyDictionary[LanguageModel, tuple[int, Tensor]] = WeakKeyDictionary()


def likely_first(model: LanguageModel) -> Int[Tensor, " vocabulary"]:
    """All tokens as a prompt may begin: special ones, then what the model expects behind the first of them.

    Found out once for a model in memory.
    """
    edition, known = _first.get(model, (-1, None))
    if known is not None and edition == model.edition:
        return known
    special, rest = special_tokens(model), torch.arange(model.vocab_size)
    if special and model.unembedding is not None:
        counted = model.forward_tokens
        last = model.states(torch.tensor([special[:1]]), ("final",))["final"][0, -1]
        model.forward_tokens = counted
        rest = next_token(model.unembedding, last).argsort(descending=True).cpu()
    first = torch.tensor(special, dtype=torch.long)
    order = torch.cat([first, rest[~torch.isin(rest, first)]])
    _first[model] = model.edition, order
    return order


def special_tokens(model: LanguageModel) -> list[int]:
    """Tokens that are no text: the beginning, the end, padding, and what else the tokenizer names."""
    named = [getattr(model.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    named += list(getattr(model.tokenizer, "all_special_ids", None) or [])
    return [one for one in dict.fromkeys(named) if isinstance(one, int) and 0 <= one < model.vocab_size]


def shared_tokens(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many first tokens two prompts have in common."""
    differ = (i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b)
    return next(differ, min(len(ids), len(others)))


def in_turns(orders: Sequence[Sequence[int]], count: int, without: Sequence[int] = ()) -> list[int]:
    """The first ``count`` tokens of several orders, taken in turns, each once."""
    seen, chosen = set(without), list[int]()
    for tokens in zip(*orders, strict=True):
        for token in tokens:
            if token not in seen and len(chosen) < count:
                seen.add(token)
                chosen.append(token)
    return chosen


def together(
    scores: Float[Tensor, " vocabulary"], expected: Float[Tensor, " vocabulary"]
) -> Int[Tensor, " vocabulary"]:
    """Every token: by a proposer's scores and what is expected together, and by either alone, in turns."""
    alone = scores.log_softmax(dim=0)
    orders = torch.stack([alone + expected, alone, expected]).argsort(dim=1, descending=True)
    turns = torch.empty_like(orders)  # the turn at which each order names a token
    turns.scatter_(1, orders, torch.arange(orders.numel()).view(orders.shape[::-1]).T.to(orders))
    return turns.amin(dim=0).argsort()


def candidates(scores: Tensor, prior: Tensor, count: int, tried: Sequence[int]) -> list[int]:
    """The next tokens to try, up to ``count`` in all: by both together, by either alone, in turns."""
    count = min(count, len(scores))
    orders = [scores.topk(count).indices.tolist()]
    if bool(prior.any()):
        orders = [(scores + prior).topk(count).indices.tolist(), *orders, prior.topk(count).indices.tolist()]
    return in_turns(orders, count - len(tried), tried)
