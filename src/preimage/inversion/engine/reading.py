"""Reading states that no prompt reproduces exactly: the likeliest token everywhere, and how sure it is.

Proposals are run in growing stretches with a rival beside every token, and what is clear is settled. At a
position that is not, more candidates are tried on the cached prefix, ranked by proposer and by the model's
own expectation behind the tokens read so far, until one stands out or the ladder ends. One wrong token
disturbs all later ones, so positions that stayed doubtful are looked at once more at the end: each
alternative is run with everything that follows, and the whole prompt decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.devices import by_device
from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.evidence import Level, Weighed, untried, weigh
from preimage.inversion.engine.expectation import Expectation, in_turns, together
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.proposers.scores import Scores
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.proposers.statistics import Statistics, statistics_of
from preimage.models import LanguageModel, Prefix

SURE = 0.99  # a position this sure is settled at once
_LADDER = {"cpu": (16, 64, 256, 1024), "cuda": (64, 1024)}  # candidates tried where it is not clear
_ALIKE = 256  # tokens of almost the same embedding that are tried beside one
_ITSELF = 0.5  # weight of what a proposer says of the first state, a sink, beside its distance
_STRETCH = (4, 64)  # positions run at once: first and most
_LOST, _NO_IDEA = 12, 0.2  # after so many positions in a row less sure than this, few candidates are tried
_SEEN = 0.02  # relative length of noise that is seen beforehand
_FIRST_TOKENS = {"cpu": 1024, "cuda": 4096}  # tried as the first with what follows
_SECONDS = (3, 64)  # second tokens tried behind each of them, and behind the likeliest
_NEXT, _FOLLOWERS, _FINALISTS = 2, 8, 64  # followers of all of them, of the finalists, and how many these are
_BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}  # of one pass
_UNREAD = 0.3  # confidence in what is only proposed
_SECOND_LOOK = 24  # alternatives run with all that follows
_WITHIN = 8.0  # nats behind the best within which a token is an alternative


@dataclass
class Read:
    """A prompt as it was read."""

    ids: list[int]
    confidence: list[float]
    distances: list[float]  # of one plain pass over the whole
    weighed: list[Weighed | None]  # None at known positions
    residuals: Float[Tensor, "position d"]  # along principal directions
    lengths: list[float]  # of the observed states, outliers weighted down
    radii: list[float]  # within which a distance is noise of an exact recomputation
    level: Level
    coarse: int  # positions known so coarsely that a token that fits may not be the only one
    finished: bool = True
    tests: list[int] = field(default_factory=list)


class Reader:
    """Reads prompts at one place of a model."""

    def __init__(self, model: LanguageModel, verifier: Verifier, proposer: Proposer, known: int = 0) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._known = known  # first positions that were not observed: their tokens are known
        self._apart = Apartness(model, verifier)

    def read(self, observed: Float[Tensor, "position d"], budget: Budget, known: Sequence[int] = ()) -> Read:
        """The likeliest prompt behind some known tokens; what the budget leaves unread is only proposed."""
        with torch.inference_mode():
            observed = observed.to(self._model.device)
            target = self._verifier.target(observed[self._known :])
            if self._known:
                target = self._verifier.behind(observed[: self._known], target)
            reading = _Reading(self._model, self._verifier, self._proposer, self._apart, observed, target)
            return reading.run(budget, list(known))


class _Reading:
    """One prompt being read."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        proposer: Proposer,
        apart: Apartness,
        observed: Float[Tensor, "position d"],
        target: Target,
    ) -> None:
        self._model, self._verifier, self._apart = model, verifier, apart
        self._observed, self._target = observed, target
        whole = statistics_of(model, verifier.tap)
        self._statistics: Statistics = whole if verifier.kept is None else whole.cut(verifier.kept)
        calm = self._statistics.denoised(self._observed.float())
        valid = torch.ones(1, len(observed), dtype=torch.bool, device=model.device)
        self._scores: Scores = proposer.score(calm[None], valid)
        first, second = self._scores.best_two()
        self._ids, self._second = first[0].cpu(), second[0].cpu()
        weights = self._target.weights
        exact = self._observed.double() if weights is None else self._observed.double() * weights
        self._lengths = exact.norm(dim=-1).clamp_min(1e-30).tolist()
        self._sinks = self._statistics.sinks(self._observed).tolist()
        self._levels = {kind: Level(observed.shape[-1]) for kind in (False, True)}
        self._expect_noise()
        self._lookalikes = lookalikes_of(model)
        self._prefix: Prefix = model.prefix(verifier.tap)
        self._expectation = Expectation(model)
        self._weighed: list[Weighed | None] = [None] * len(observed)
        self._tests = [0] * len(observed)
        self._begun = len(observed) < 2  # whether the first token was looked at with what follows it
        self._rung = 0  # of the ladder, at which the next doubtful position begins
        self._lost = 0  # positions in a row at which not even the whole ladder helped

    def _expect_noise(self) -> None:
        """White noise shows in the quiet directions of the states before anything is read."""
        variance = self._statistics.noise_variance(self._observed)
        seen = (variance * self._observed.shape[-1]).sqrt().cpu()
        relative = float((seen / torch.tensor(self._lengths)).median())
        if relative > _SEEN:
            self._levels[False].expect_white(relative)

    def run(self, budget: Budget, known: list[int]) -> Read:
        finished = True
        self._ids[: len(known)] = torch.tensor(known, dtype=self._ids.dtype)
        if known:
            self._prefix.extend(self._ids[: len(known)])
        at, stretch = len(known), _STRETCH[0]
        try:
            while at < len(self._ids):
                stretch = min(stretch, len(self._ids) - at)
                settled = self._run_stretch(at, stretch, budget)
                at += settled
                if settled < stretch:
                    self._decide(at, budget)
                    at += 1
                stretch = min(_STRETCH[1], 2 * stretch if settled == stretch else max(2, settled))
                if not known and not self._begun and at > min(_FOLLOWERS, len(self._ids) - 1):
                    at = self._settle_first(at, budget)
            self._look_again(len(known), budget)
        except BudgetSpentError:
            finished = False
        return self._conclude(len(known), finished)

    def _settle_first(self, at: int, budget: Budget) -> int:
        """Choose the first two tokens by the states that follow them; where to read on.

        The first state is a sink: noise drowns what it says. But what follows looks back on it, so that a
        wrong first token disturbs everything, the second most of all.
        """
        self._begun = True
        first = self._weighed[0]
        if first is None or first.distances[0] <= self._target.radii[0]:
            return at  # it fits exactly
        heads = self._heads(first)[: max(1, budget.tests_left // 4)]
        share = 0.0
        for followers, finalists in ((_NEXT, _FINALISTS), (_FOLLOWERS, 2)):
            budget.check(len(heads))
            budget.tests += len(heads)
            scores = self._evidence_of_heads(heads, min(followers, at - 1, len(self._ids) - 1))
            best = scores.topk(min(finalists, len(scores))).indices
            share = float(scores.softmax(dim=0)[best[0]])
            heads = heads[best]
        wide = by_device(_FIRST_TOKENS, self._model.device)
        sure = share * (1 - untried(wide)) if wide < self._model.vocab_size else share
        chosen = int(heads[0, 0])
        if chosen == int(self._ids[0]) and int(heads[0, 1]) == int(self._ids[1]):
            self._weighed[0] = replace(first, confidence=sure)
            return at
        self._ids[1] = heads[0, 1]
        self._prefix.crop(0)
        state = self._prefix.extend(heads[0, :1])[0]
        away = float(self._away(self._target[0], state[None])[0])
        for kind in (False, True):
            self._levels[kind] = Level(self._observed.shape[-1])
        self._expect_noise()
        self._settle(0, Weighed([chosen], [0.0], [away], sure, first.gap), state)
        return 1

    def _heads(self, first: Weighed) -> Int[Tensor, "candidate 2"]:
        """Pairs that a prompt may begin with: many first tokens with few second ones, few with many."""
        scores = [self._scores.at(self._scores.row(0, at))[0].cpu() for at in (0, 1)]
        opening = self._expectation.behind(self._opening)
        order = scores[0].argsort(descending=True) if opening is None else together(scores[0], opening)
        wide = order[: by_device(_FIRST_TOKENS, self._model.device)].tolist()
        tokens = list(dict.fromkeys([*first.tokens[:_FINALISTS], *wide]))
        seconds = [int(self._ids[1]), *scores[1].topk(min(_SECONDS[1], len(scores[1]))).indices.tolist()]
        some, many = _SECONDS
        pairs = [(u, v) for u in tokens for v in dict.fromkeys(seconds[:some])]
        pairs += [(u, v) for u in tokens[:_FINALISTS] for v in seconds[some:many]]
        return torch.tensor(pairs)

    @property
    def _opening(self) -> list[int]:
        """What may stand before a prompt, for an idea of how prompts begin."""
        bos = getattr(self._model.tokenizer, "bos_token_id", None)
        return [] if bos is None else [int(bos)]

    def _evidence_of_heads(
        self, heads: Int[Tensor, "candidate 2"], followers: int
    ) -> Float[Tensor, " candidate"]:
        """The log likelihood of each beginning, together with the tokens that were read behind it."""
        tap, length = self._verifier.tap, 1 + followers
        target = self._target[:length]
        floors = target.radius.to(torch.float64) / 4
        directions = torch.tensor([self._levels[sink].directions for sink in self._sinks[:length]])
        size = max(1, by_device(_BATCH_TOKENS, self._model.device) // length)
        totals = []
        for part in heads.split(size):
            rows = torch.cat([part, self._ids[None, 2:length].expand(len(part), -1)], dim=1)[:, :length]
            away = self._away(target, self._model.states(rows, (tap,))[tap])
            logs = (away.square() + floors.square()).log()
            totals.append(-0.5 * (directions * logs).sum(dim=1))
        return torch.cat(totals)

    def _run_stretch(self, at: int, stretch: int, budget: Budget) -> int:
        """Run the next proposals, each with a rival beside it; how many of them are sure, from the left."""
        row, second = self._ids[at : at + stretch], self._second[at : at + stretch]
        budget.check(2 * len(row))
        places = torch.arange(at, at + len(row))
        held = len(self._prefix)
        if not self._apart.takes_branches(at + len(row)):
            if held < at:
                self._prefix.extend(self._ids[held:at])
            return 0
        ids = self._ids[held : at + len(row)]  # with what was decided since
        states, rivals = self._prefix.extend_and_try(ids, places, second)
        states = states[at - held :]
        away = self._away(self._target[at : at + len(row)], states)
        beside = self._away(self._target[at : at + len(row)], rivals)
        budget.tests += 2 * len(row)
        settled = 0
        for i, (token, other) in enumerate(zip(row.tolist(), second.tolist(), strict=True)):
            distances = torch.stack([away[i], beside[i]])
            weighed = self._weigh(at + i, [token, other], distances, torch.zeros(2))
            self._tests[at + i] += 2
            usual = self._levels[self._sinks[at + i]].usual(weighed.distances[0] / self._lengths[at + i])
            clear = usual and token != other and self._lookalikes.unmistakable([token])
            if weighed.tokens[0] != token or weighed.confidence < SURE or not clear:
                break
            self._settle(at + i, weighed, states[i])
            settled += 1
        self._prefix.crop(at + settled)
        return settled

    def _decide(self, at: int, budget: Budget) -> None:
        """Try candidates at one position, ever more of them, until one is sure; take the likeliest."""
        scores = self._scores.at(torch.tensor([at], device=self._observed.device))[0].log_softmax(dim=0)
        tried: list[int] = []
        distances, states = torch.empty(0), torch.empty(0)
        weighed, prior = None, torch.zeros(self._model.vocab_size)
        ladder = by_device(_LADDER, self._model.device)[: 1 if self._lost >= _LOST else None]
        for rung in range(min(self._rung, len(ladder) - 1), len(ladder)):
            count = ladder[rung]
            if rung:
                prior = self._prior(at)
            fresh = _candidates(scores.cpu(), prior, count, tried)
            own = _ITSELF * scores.cpu() if at == 0 else prior
            while fresh:  # and what the likeliest of them could be mistaken for
                budget.check(len(fresh))
                for part in torch.tensor(fresh).split(self._prefix.max_candidates):
                    seen = self._prefix.try_tokens(part)
                    distances = torch.cat([distances, self._away(self._target[at], seen)])
                    states = torch.cat([states.to(seen), seen]) if len(states) else seen
                budget.tests += len(fresh)
                tried += fresh
                weighed = self._weigh(at, tried, distances, own[tried])
                fresh = self._mistakable(weighed.tokens[0], tried)
            if weighed is None:
                break
            self._rung = max(0, rung - 1)
            if weighed.confidence >= SURE:
                break
        assert weighed is not None, "a vocabulary has at least one token"
        self._lost = self._lost + 1 if weighed.confidence < _NO_IDEA else 0
        self._tests[at] += len(tried)
        self._settle(at, weighed, states[tried.index(weighed.tokens[0])])

    def _mistakable(self, token: int, tried: list[int]) -> list[int]:
        """Tokens of the same embedding, or of almost the same, that were not tried yet."""
        alike = (*self._lookalikes.twins(token), *self._lookalikes.near(token))
        return [other for other in alike if other not in set(tried)][:_ALIKE]

    def _settle(self, at: int, weighed: Weighed, state: Float[Tensor, " d"]) -> None:
        self._ids[at] = weighed.tokens[0]
        self._weighed[at] = weighed
        residual = self._observed[at].double() - self._verifier.observe(state[None])[0].double()
        if self._target.weights is not None:
            residual = residual * self._target.weights[at]
        self._levels[self._sinks[at]].note(
            weighed.distances[0] / self._lengths[at], self._statistics.coordinates(residual)
        )

    def _weigh(self, at: int, tokens: list[int], distances: Tensor, prior: Tensor) -> Weighed:
        return weigh(
            tokens, distances, prior, self._levels[self._sinks[at]],
            length=self._lengths[at], floor=self._target.radii[at] / 4, vocab_size=self._model.vocab_size,
        )  # fmt: skip

    def _prior(self, at: int) -> Float[Tensor, " vocabulary"]:
        """Log probabilities of every token behind those read so far; none at the first position."""
        expected = self._expectation.behind(self._ids[:at].tolist())
        return torch.zeros(self._model.vocab_size) if expected is None else expected

    def _away(self, target: Target, states: Tensor) -> Tensor:
        return target.away(self._verifier.observe(states)).cpu()

    def _look_again(self, known: int, budget: Budget) -> None:
        """Run alternatives of doubtful positions with all that follows; the whole prompt decides."""
        doubtful = [
            (at, token)
            for at, weighed in enumerate(self._weighed)
            if weighed is not None and weighed.confidence < SURE
            for token, score in list(zip(weighed.tokens, weighed.scores, strict=True))[1:4]
            if score >= weighed.scores[0] - _WITHIN
        ][:_SECOND_LOOK]
        if not doubtful or len(self._ids) < 2:
            return
        budget.check(len(doubtful))
        base = self._evidence(self._ids)
        for at, token in doubtful:
            row = self._ids.clone()
            row[at] = token
            other = self._evidence(row)
            budget.tests += 1
            weighed = self._weighed[at]
            assert weighed is not None
            before = weighed.scores[weighed.tokens.index(int(self._ids[at]))]
            gain = float((other - base)[at + 1 :].sum())
            gain += weighed.scores[weighed.tokens.index(token)] - before
            if gain > 0:
                self._ids, base = row, other
                self._weighed[at] = replace(weighed, confidence=weighed.confidence * _logistic(gain))

    def _evidence(self, row: Int[Tensor, " position"]) -> Float[Tensor, " position"]:
        """The log likelihood of every position of a prompt, one plain pass."""
        distances = torch.tensor(self._verifier.whole_sequence(row.tolist(), self._target))
        floors = torch.tensor(self._target.radii) / 4
        directions = torch.tensor([self._levels[sink].directions for sink in self._sinks])
        logs = (distances.square() + floors.square()).log()
        return -0.5 * directions * logs

    def _conclude(self, known: int, finished: bool) -> Read:
        """The prompt as it was read, and what a plain pass over the whole of it leaves unexplained."""
        tap = self._verifier.tap
        states = self._verifier.observe(self._model.states(self._ids[None], (tap,))[tap][0])
        residual = self._observed.double() - states.double()
        if self._target.weights is not None:
            residual = residual * self._target.weights
        confidence = [
            1.0 if at < known else _UNREAD if weighed is None else weighed.confidence
            for at, weighed in enumerate(self._weighed)
        ]
        return Read(
            self._ids.tolist(),
            confidence,
            self._target.away(states).tolist(),
            self._weighed,
            self._statistics.coordinates(residual),
            self._lengths,
            self._target.radii,
            self._levels[False],
            self._target.coarse,
            finished,
            self._tests,
        )


def _candidates(scores: Tensor, prior: Tensor, count: int, tried: list[int]) -> list[int]:
    """The next tokens to try: by both together, by the proposer, by the prior, in turns."""
    count = min(count, len(scores))
    orders = [scores.topk(count).indices.tolist()]
    if bool(prior.any()):
        orders = [(scores + prior).topk(count).indices.tolist(), *orders, prior.topk(count).indices.tolist()]
    return in_turns(orders, count - len(tried), tried)


def _logistic(nats: float) -> float:
    return float(torch.sigmoid(torch.tensor(nats)))
