"""The search for a prompt of several tokens when all that was kept of it is one vector.

Whole prompts are tried, and how far each one's vector is from the observed one is all that counts. Which are
tried is a search from the best prompt so far: readers (``proposers/backwards.py``) rank the tokens of every
slot, the model itself says what may follow the tokens before a slot, and a token that comes near suggests
others like it. Every length has its share of the search, the likelier the more.
Nothing found here is an answer before it was checked alone and its neighbours were tried.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.devices import by_device
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.proposers.backwards import LONGEST_READ, Readers, fit_readers, kept_readers
from preimage.inversion.proposers.features import features_of
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.states import residual_stream

MAX_LENGTH = LONGEST_READ  # tokens of the longest prompts that are searched for
ENUMERATED = 4096  # where there are no more prompts of a length than this, all of them are tried
_BATCH = {"cpu": 1024, "cuda": 65536}  # tokens in one pass
_TOGETHER = {"cpu": 1, "cuda": 16}  # prompts whose neighbours are tried together
_START, _START_EXPECTED = 96, 16  # prompts to begin with, by the readers alone and with what a model expects
_START_TOKENS = 64  # at each slot, to make these of
_HEAD_START = 2048  # tokens that the likeliest length is ahead of one with half its share
_WIDTHS = (
    24,
    96,
    384,
)  # tokens tried at every slot beside one prompt, wider each time it is the nearest left
_SURE = 8  # where a reader is sure, one in so many of them
_SURE_LEAD = 8.0  # of the best token over the next one: a reader so far ahead is sure
_PRIOR = 2.0  # weight of the model's own expectation beside a reader
_WIDER = (
    0.04  # what a prompt's distance is raised by, each time it was widened, for each slot before its last
)
_UNLIKELY = 0.25  # a length has half the share of the likeliest when 1 / _UNLIKELY nats less likely
_MAY_BE_ONE = 20.0  # nats that a prompt of one token may be less likely and still is tried before all others
_NEAREST = 512  # prompts that do not fit are kept, to say how sure a reading is
_UNVERIFIED = 0.9  # how sure a token of a prompt that does not fit may be
_HELD = 256  # prompts of one round that are kept to go on from

Prompt: TypeAlias = tuple[int, ...]
_readers: WeakKeyDictionary[LanguageModel, dict[tuple[object, ...], Readers]] = WeakKeyDictionary()


def readers_of(model: LanguageModel, verifier: Verifier, *, mean: bool) -> Readers:
    """The readers of a layer, kept for a model in memory and, of raw states, in the user's cache."""
    layer, observe = verifier.tap, verifier.observe
    known = _readers.setdefault(model, {})
    key = model.edition, layer, observe, mean
    if key not in known:
        features = features_of(model)

        def see(ids: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt position d"]:
            return observe(model.states(ids, (layer,))[layer])

        if observe is residual_stream and model.lasting:
            name = f"{'mean' if mean else 'last'}-{layer}"
            known[key] = kept_readers(model, name, see, features, mean=mean)
        else:
            known[key] = fit_readers(model, see, features, mean=mean)
    return known[key]


class Tried:
    """Whole prompts tried against one vector: those that may fit, and the nearest of all others."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        target: Target,
        budgets: Sequence[Budget],
        *,
        mean: bool,
        progress: Progress = silent,
    ) -> None:
        self._model, self._verifier, self._target = model, verifier, target
        self._progress, self._mean = progress, mean
        self.budgets = tuple(budgets)
        self.fits: dict[Prompt, float] = {}
        self.outside: tuple[float, Prompt] = (float("inf"), ())  # the nearest that does not fit
        self._near: list[tuple[float, Prompt]] = []  # the nearest of these, the furthest of them first
        self.counts: Counter[int] = Counter()  # prompts tried, by length
        self._seen: set[int] = set()  # hashes of all that were tried: there may be millions

    def test(self, prompts: Iterable[Prompt], *, again: bool = False) -> list[tuple[float, Prompt]]:
        """The distances of prompts of one length, as far as the budget goes.

        Those that were tried before are left out, or tried ``again``.
        """
        fresh = [prompt for prompt in dict.fromkeys(prompts) if again or hash(prompt) not in self._seen]
        results: list[tuple[float, Prompt]] = []
        size = max(1, by_device(_BATCH, self._model.device) // max(map(len, fresh), default=1))
        for start in range(0, len(fresh), size):
            for budget in self.budgets:
                budget.check()
            part = fresh[start : start + size][: min(budget.tests_left for budget in self.budgets)]
            for distance, prompt in zip(self._away(part), part, strict=True):
                results.append((distance, prompt))
                self.note(distance, prompt)
            for budget in self.budgets:
                budget.tests += len(part)
            least = min(self.budgets, key=lambda budget: budget.tests_left)
            self._progress(least.tests, least.tests + least.tests_left, "prompts tried")
        return results

    def note(self, distance: float, prompt: Prompt) -> None:
        """Remember a prompt that was tried, here or elsewhere."""
        if hash(prompt) not in self._seen:
            self._seen.add(hash(prompt))
            self.counts[len(prompt)] += 1
        if distance <= self._target.reaches[0]:
            self.fits[prompt] = distance
        else:
            self.outside = min(self.outside, (distance, prompt))
            push = heapq.heappush if len(self._near) < _NEAREST else heapq.heappushpop
            push(self._near, (-distance, prompt))

    def read(self) -> tuple[tuple[int, float], ...]:
        """The nearest prompt that does not fit; a token is the surer the further all others there are.

        Slots are counted from the end: the last token is the one a vector says most of.
        """
        nearest, prompt = self.outside
        furthest = -min(self._near)[0] if self._near else nearest
        read = []
        for slot, token in enumerate(prompt, -len(prompt)):
            apart = (-far for far, other in self._near if len(other) < -slot or other[slot] != token)
            rival = min(apart, default=furthest)
            read.append((token, min(_UNVERIFIED, max(0.0, 1 - nearest / rival)) if rival else 0.0))
        return tuple(read)

    def alone(self, prompt: Prompt) -> float:
        """The distance after one plain pass over this prompt alone: the final word."""
        return self._away([prompt])[0]

    def repeated(self, token: int, longest: int) -> list[float]:
        """The distances of a token alone, twice, and so on, in one pass."""
        states = self._states(torch.full((1, longest), token))[0]
        if self._mean:
            states = states.double().cumsum(dim=0) / torch.arange(1, longest + 1).to(states)[:, None]
        return self._target.away(states).tolist()

    def _away(self, prompts: Sequence[Prompt]) -> list[float]:
        states = self._states(torch.tensor(prompts))
        return self._target.away(states.double().mean(dim=1) if self._mean else states[:, -1]).tolist()

    def _states(self, ids: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt position d"]:
        tap = self._verifier.tap
        return self._verifier.observe(self._model.states(ids, (tap,))[tap])


class VectorSearch:
    """The search for one vector's prompt: :meth:`run` ends when a prompt may fit, or with the budget."""

    def __init__(
        self,
        model: LanguageModel,
        readers: Readers,
        vector: Float[Tensor, " d"],
        tried: Tried,
        *,
        mean: bool,
        max_length: int = MAX_LENGTH,
    ) -> None:
        self._model, self._tried, self._mean = model, tried, mean
        self._features = features_of(model)
        self._table = model.unembedding
        likely = readers.lengths(vector)[: min(max_length, readers.longest)]
        self.lengths = sorted(range(1, len(likely) + 1), key=lambda n: -likely[n - 1])
        best = max(likely)
        self.may_be_one = likely[0] >= best - _MAY_BE_ONE
        # what a token costs by the length of its prompt; whoever has spent least is next
        self._cost = {n: 1 + _UNLIKELY * (best - likely[n - 1]) for n in self.lengths}
        self._spent = {n: _HEAD_START * (cost - 1) for n, cost in self._cost.items()}
        self._begun: set[int] = {1}  # one token alone is not searched for
        self._scores = {n: readers.slots(vector, n, self._features, mean=mean) for n in self.lengths if n > 1}
        self._like: dict[int, list[int]] = {}  # tokens like a token
        # by length: priority, level, distance and prompt
        self._heaps: dict[int, list[tuple[float, int, float, Prompt]]] = {n: [] for n in self.lengths}

    def run(self) -> None:
        """Try prompts until one may fit, all that can be reached were tried, or the budget is spent."""
        for n in self.lengths:
            if n > 1 and self._model.vocab_size**n <= ENUMERATED:
                self._try(product(range(self._model.vocab_size), repeat=n))
        while not self._tried.fits and (open_ := [n for n in self.lengths if self._is_open(n)]):
            n = min(open_, key=self._spent.__getitem__)
            if n in self._begun:
                self._widen(n)
            else:
                self._begun.add(n)
                self._try(self._start(n))

    def _is_open(self, length: int) -> bool:
        return length not in self._begun or bool(self._heaps[length])

    def _widen(self, length: int) -> None:
        """Try prompts beside the best of a length."""
        heap = self._heaps[length]
        together = min(by_device(_TOGETHER, self._model.device), len(heap))
        near = [heapq.heappop(heap) for _ in range(together)]
        for _, level, distance, prompt in near:
            if level + 1 < len(_WIDTHS) + length:
                self._push(distance, level + 1, prompt)
        self._try(chain(*(self._moves(prompt, level) for _, level, _, prompt in near)))

    def _try(self, prompts: Iterable[Prompt]) -> None:
        results = self._tried.test(prompts)
        for distance, prompt in heapq.nsmallest(_HELD, results):
            self._push(distance, 0, prompt)
        for _, prompt in results[:1]:
            self._spent[len(prompt)] += len(results) * len(prompt) * self._cost[len(prompt)]

    def _push(self, distance: float, level: int, prompt: Prompt) -> None:
        n = len(prompt)
        priority = distance * (1 + _WIDER * level * min(n - 1, 3))
        heapq.heappush(self._heaps[n], (priority, level, distance, prompt))

    def _start(self, length: int) -> list[Prompt]:
        """The likeliest prompts by the readers alone, and with what the model expects."""
        prompts = self._beam(length, _START, 0.0)
        if self._table is not None:
            prompts += self._beam(length, _START_EXPECTED, 1.0)
        return prompts

    def _beam(self, length: int, count: int, prior: float) -> list[Prompt]:
        """Prompts grown slot by slot, the ``count`` likeliest kept."""
        ids = torch.zeros(1, 0, dtype=torch.long)
        totals = torch.zeros(1)
        for slot in range(length):
            scores = self._scores[length][slot].expand(len(ids), -1)
            if prior and slot:
                scores = scores + prior * self._expected(ids, last=True)[:, 0]
            if self._mean and slot:  # the slots' readers are the same, and one vector must not count twice
                scores = scores.scatter(1, ids.to(scores.device), -torch.inf)
            few = scores.topk(min(_START_TOKENS, scores.shape[1]))
            sums = (totals[:, None] + few.values.cpu()).flatten()
            best = sums.topk(min(count, int(torch.isfinite(sums).sum())))
            rows, columns = best.indices // few.indices.shape[1], best.indices % few.indices.shape[1]
            ids = torch.cat([ids[rows], few.indices.cpu()[rows, columns][:, None]], dim=1)
            totals = best.values
        return [tuple(row) for row in ids.tolist()]

    def _expected(
        self, ids: Int[Tensor, "prompt position"], *, last: bool = False
    ) -> Float[Tensor, "prompt asked vocabulary"]:
        """Log-probabilities of what follows each position, or the last, as the model has them."""
        assert self._table is not None, "a model without an LM head expects nothing"
        final = self._model.states(ids, ("final",))["final"][:, -1 if last else 0 :]
        return (final.to(self._table.dtype) @ self._table.T).float().log_softmax(dim=-1)

    def _moves(self, prompt: Prompt, level: int) -> Iterator[Prompt]:
        """Prompts beside one: other tokens at every slot, or all tokens at one; and slots exchanged."""
        wide = level - len(_WIDTHS)
        if wide >= 0:
            return (_changed(prompt, wide, token) for token in range(self._model.vocab_size))
        first = _WIDTHS[level - 1] if level else 0
        exchanged = _exchanged(prompt) if level == 0 else iter(())
        tokens = self._tokens(prompt, _WIDTHS[level])
        changed = (
            _changed(prompt, slot, token)
            for slot, (order, share) in enumerate(tokens)
            for token in order[first // share : _WIDTHS[level] // share]
        )
        return chain(exchanged, changed)

    def _tokens(self, prompt: Prompt, count: int) -> Iterator[tuple[list[int], int]]:
        """Tokens to try at every slot, most promising first, and one in how many of them is enough."""
        expected = None
        if self._table is not None and len(prompt) > 1:
            expected = self._expected(torch.tensor([prompt[:-1]]))[0]
        count = min(count, self._model.vocab_size)
        for slot, token in enumerate(prompt):
            scores = self._scores[len(prompt)][slot]
            ranked = scores.topk(count)
            orders = [ranked.indices.tolist(), self._alike(token, count)]
            if expected is not None and slot:
                orders.append((scores + _PRIOR * expected[slot - 1]).topk(count).indices.tolist())
            lead = float(ranked.values[0] - ranked.values[min(1, count - 1)])
            yield list(dict.fromkeys(chain(*zip(*orders, strict=True)))), _SURE if lead > _SURE_LEAD else 1

    def _alike(self, token: int, count: int) -> list[int]:
        """Tokens whose features are most like a token's."""
        most = min(_WIDTHS[-1], self._model.vocab_size)
        if token not in self._like:
            self._like[token] = (self._features @ self._features[token]).topk(most).indices.tolist()
        return self._like[token][:count]


def neighbours(prompt: Prompt) -> list[Prompt]:
    """Prompts of the same tokens that a model might take for this one: fewer, more, or in another order."""
    beside = [(prompt[0], *prompt), (*prompt, prompt[-1]), *_exchanged(prompt)]
    return beside + ([prompt[1:], prompt[:-1]] if len(prompt) > 1 else [])


def _changed(prompt: Prompt, slot: int, token: int) -> Prompt:
    return (*prompt[:slot], token, *prompt[slot + 1 :])


def _exchanged(prompt: Prompt) -> Iterator[Prompt]:
    for i in range(len(prompt)):
        for j in range(i + 1, len(prompt)):
            yield _changed(_changed(prompt, i, prompt[j]), j, prompt[i])
