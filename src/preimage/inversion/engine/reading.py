"""Reading states that no prompt reproduces exactly: the likeliest token everywhere, and how sure it is.

After a first look, proposals are run in growing stretches with a rival beside every token, and what is clear
is settled. At a position that is not, more candidates are tried behind the tokens read so far, ranked by
proposer and by the model's own expectation, until one stands out or the ladder ends. One wrong token disturbs
all later ones, so positions that stayed doubtful are looked at once more at the end: each alternative is run
with everything that follows, and the whole prompt decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.devices import by_device
from preimage.inversion.engine.asking import Asking, Branches, Expected, Rows, Tangent
from preimage.inversion.engine.beginnings import Beginnings
from preimage.inversion.engine.budget import Budget, BudgetSpentError
from preimage.inversion.engine.evidence import Level, Noise, Read, Weighed, weigh
from preimage.inversion.engine.expectation import candidates
from preimage.inversion.engine.first_look import FirstLook, Proposals, first_look, propose
from preimage.inversion.engine.first_states import first_states
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.second_look import look_again
from preimage.inversion.engine.tangent import LEADING
from preimage.inversion.engine.trial import Trial
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.proposers.registry import LENS
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.proposers.statistics import Statistics, statistics_of
from preimage.models import LanguageModel
from preimage.progress import settled

SURE = 0.99  # a position this sure is settled at once
_CLEAR = 0.9  # in white noise, where one candidate is far ahead of all others that were tried
_LADDER = {"cpu": (16, 64, 256, 1024), "cuda": (64, 256, 1024)}  # candidates tried where it is not clear
_EXPECTED = {"cpu": 0, "cuda": 1}  # the rung from which the model's expectation, a pass on a GPU, is worth it
_ALIKE = 256  # tokens of almost the same embedding that are tried beside one
_ITSELF = 0.5  # weight of what a proposer says of the first state, a sink, beside its distance
_STRETCH = {"cpu": (4, 64), "cuda": (256, 256)}  # positions run at once: first and most
_LOST, _NO_IDEA = 12, 0.2  # after so many positions in a row less sure than this, few candidates are tried
_NOISY = 4.0  # a distance of one in so many radii is noise in any case
_FOLLOWERS = 8  # positions by which the beginning of a prompt is settled
_KEPT = 1024  # first tokens that are remembered of a whole vocabulary
_AT_ONCE = 16384  # states compared at once
_SCANS, _SCANNED = 4, 4096  # scans of a vocabulary in one prompt, and how many of its tokens at once
_APART = 3.0  # times as far as the likeliest are others of a right token that noise has moved far off
_SEVERAL = 16  # positions read, of which many are sure if the states are of a prompt
_UNREAD = 0.3  # confidence in what is only proposed


class PromptReading:
    """One prompt being read."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        proposer: Proposer,
        observed: Float[Tensor, "position d"],
        target: Target,
        fitting: Sequence[int],
    ) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._observed, self._target, self._exact, self._fitting = observed, target, target, fitting
        whole = statistics_of(model, verifier.tap)
        self._statistics: Statistics = whole if verifier.kept is None else whole.cut(verifier.kept)
        weights = target.weights
        exact = observed.double() if weights is None else observed.double() * weights
        self._lengths: list[float] = exact.norm(dim=-1).clamp_min(1e-30).tolist()
        self._own_lengths = self._lengths
        sinks = self._statistics.sinks(observed)
        sinks[:1] = True  # whatever its length
        self._sinks: list[bool] = sinks.tolist()
        self._tilt = float(self._statistics.tilt)
        self._forget_levels()
        self._noise: Noise | None = None  # white noise that a first look has shown
        self._lookalikes = lookalikes_of(model)
        self._weighed: list[Weighed | None] = [None] * len(observed)
        self._tests = [0] * len(observed)
        self._likely: list[int] = []  # first tokens, where the whole vocabulary was weighed there
        self._rung = 0  # of the ladder, at which the next doubtful position begins
        self._lost = 0  # positions in a row at which not even the whole ladder helped
        self._along_tangents = not proposer.name.startswith(LENS)
        self._scans = 0  # positions at which the whole vocabulary was tried

    def look(self, budget: Budget, known: Sequence[int]) -> Asking[FirstLook]:
        """A first look at the states, which comes before reading them."""
        sinks = torch.tensor(self._sinks, device=self._observed.device)
        found = yield from first_look(
            self._observed, self._verifier, self._proposer, self._statistics, sinks,
            known, self._fitting, budget,
        )  # fmt: skip
        self._take(found.proposals)
        if found.noise is not None and self._target.low is self._target.high:
            self._noise = found.noise  # in few bits, noise is what cells allow
            self._target = replace(self._target, weights=None)  # all coordinates are as noisy as one another
            self._lengths = self._observed.double().norm(dim=-1).clamp_min(1e-30).tolist()
            self._expect_noise()
        return found

    def _take(self, proposals: Proposals) -> None:
        self._scores, self._ids, self._second = proposals

    def run(self, budget: Budget, known: list[int]) -> Asking[Read]:
        """Read it all, behind known tokens, after a first look."""
        finished = True
        try:
            while (yield from self._read_on(known, budget)):  # what was taken for noise is none: once more
                self._forget_noise(known)
            yield from look_again(self._ids, self._weighed, self._likelihoods, SURE, budget)
        except BudgetSpentError:
            finished = False
        return (yield from self._conclude(len(known), finished))

    def _read_on(self, known: list[int], budget: Budget) -> Asking[bool]:
        """Read from the left to the end; whether that was given up: states are nearer than noise allows."""
        looks = 0 if known or len(self._ids) < 2 else 2
        first, most = by_device(_STRETCH, self._model.device)
        at, stretch = len(known), first
        at += 0 if known else self._weigh_first(budget)
        while at < len(self._ids) or (looks == 1 and not self._is_usual(1)):
            if at < len(self._ids):
                stretch = min(stretch, len(self._ids) - at)
                settled = yield from self._run_stretch(at, stretch, budget)
                at += settled
                if settled < stretch:
                    yield from self._decide(at, budget)
                    at += 1
                if self._noise is not None and self._noise.refuted(self._weighed, self._lengths, self._sinks):
                    return True
                stretch = max(first // 2, min(most, 2 * stretch if settled == stretch else settled))
            enough = min(_FOLLOWERS, len(self._ids) - 1) if looks == 2 else len(self._ids) - 1
            if looks and at > enough and (looks == 2 or not self._is_usual(1)):  # its end may not fit
                looks -= 1
                at = yield from self._settle_first(at, budget)
        return False

    def _forget_noise(self, known: list[int]) -> None:
        """Begin anew with states as they are."""
        self._noise, self._target, self._lengths = None, self._exact, self._own_lengths
        given = [*known, *self._fitting[len(known) :]]
        self._take(propose(self._proposer, self._observed.float(), given))
        self._forget_levels()
        self._rung = self._lost = 0
        self._weighed = [None] * len(self._weighed)

    def _weigh_first(self, budget: Budget) -> int:
        """Weigh the whole vocabulary at the first position; how many positions that settles, one or none."""
        count = self._model.vocab_size
        states = first_states(self._model, self._verifier.tap) if budget.tests_left >= count else None
        if states is None:
            return 0
        budget.check(count)
        budget.tests += count
        self._tests[0] += count
        observe, target = self._verifier.observe, self._target[0]
        rough = [target.roughly_away(observe(part)).cpu() for part in states.split(_AT_ONCE)]
        distances = torch.cat(rough).double()
        nearest = distances.topk(min(_KEPT, count), largest=False).indices
        distances[nearest] = self._away(target, states[nearest.to(states.device)])
        own = torch.zeros(count)
        if self._noise is None:
            own = _ITSELF * self._scores.at(self._scores.row(0, 0))[0].log_softmax(dim=0).cpu()
        weighed = self._weigh(0, list(range(count)), distances, own).cut(_KEPT)
        self._likely = weighed.tokens
        self._settle(0, weighed, states[weighed.tokens[0]])
        return 1

    def _forget_levels(self) -> None:
        self._levels = {kind: Level(self._observed.shape[-1], self._tilt) for kind in (False, True)}

    def _expect_noise(self) -> None:
        """Take in what a first look has shown."""
        if self._noise is not None:
            for level in self._levels.values():
                level.expect(self._noise)

    def _residual(self, states: Float[Tensor, "position _"]) -> Float[Tensor, "position d"]:
        """What states leave unexplained of what was observed, from the first position on."""
        return self._observed[: len(states)].double() - self._verifier.observe(states).double()

    def _settle_first(self, at: int, budget: Budget) -> Asking[int]:
        """Choose the first two tokens by the states that follow them; where to read on.

        The first state is a sink: noise drowns what it says. But what follows looks back on it, so that a
        wrong first token disturbs everything, the second most of all.
        """
        first, second = self._weighed[:2]
        if first is None or second is None or first.distances[0] <= self._target.radii[0]:
            return at  # it fits exactly
        followers = min(_FOLLOWERS, at - 1, len(self._ids) - 1)
        noisy = self._levels[False].white
        beginnings = Beginnings(
            self._model, self._scores, self._ids[: 1 + followers], self._likely or first.tokens,
            self._likelihoods,
            itself=0.0 if noisy else _ITSELF,
            noisy=noisy,
            compared=bool(self._likely),
        )  # fmt: skip
        found = yield from beginnings.settle(SURE, budget)
        if found.ids == self._ids[:2].tolist():
            self._weighed[0] = replace(first, confidence=found.sure[0])
            self._weighed[1] = replace(second, confidence=min(second.confidence, found.sure[1]))
            return at
        self._ids[:2] = torch.tensor(found.ids)
        states = yield Rows(self._ids[None, :2])
        self._forget_levels()
        self._expect_noise()
        away = self._away(self._target[:2], states[0]).tolist()
        for one, token in enumerate(found.ids):
            sure = found.sure[one] / (1 + len(self._mistakable(token, [token])))
            self._settle(one, Weighed([token], [0.0], [away[one]], sure, first.gap), states[0, one])
        return 2

    def _likelihoods(self, states: Float[Tensor, "row position d"]) -> Float[Tensor, "row position"]:
        """The log likelihood of every position of prompts, as far as they go."""
        length = states.shape[1]
        target = self._target[:length]
        floors = target.radius.to(torch.float64) / _NOISY
        directions = torch.tensor([self._levels[sink].directions for sink in self._sinks[:length]])
        return -0.5 * directions * (self._away(target, states).square() + floors.square()).log()

    def _run_stretch(self, at: int, stretch: int, budget: Budget) -> Asking[int]:
        """Run the next proposals, each with a rival beside it; how many of them are sure, from the left."""
        row, second = self._ids[at : at + stretch], self._second[at : at + stretch]
        budget.check(2 * len(row))
        places = torch.arange(at, at + len(row))
        states, rivals = yield Branches(self._ids[: at + len(row)], at, places, second)
        away = self._away(self._target[at : at + len(row)], states)
        beside = self._away(self._target[at : at + len(row)], rivals)
        budget.tests += 2 * len(row)
        settled = 0
        for i, (token, other) in enumerate(zip(row.tolist(), second.tolist(), strict=True)):
            distances = torch.stack([away[i], beside[i]])
            weighed = self._weigh(at + i, [token, other], distances, torch.zeros(2))
            self._tests[at + i] += 2
            usual = self._levels[self._sinks[at + i]].usual(self._relative(at + i, weighed))
            clear = usual and token != other and self._lookalikes.unmistakable([token])
            if weighed.tokens[0] != token or weighed.confidence < SURE or not clear:
                break
            self._settle(at + i, weighed, states[i])
            settled += 1
        return settled

    def _decide(self, at: int, budget: Budget) -> Asking[None]:
        """Try candidates at one position, ever more of them, until one is sure; take the likeliest."""
        scores = self._scores.at(self._scores.row(0, at))[0].log_softmax(dim=0)
        trial, prior = Trial(), torch.zeros_like(scores)
        weighed = None
        ladder = by_device(_LADDER, self._model.device)[: 1 if self._is_hopeless(at) else None]
        for rung in range(min(self._rung, len(ladder) - 1), len(ladder)):
            if rung >= by_device(_EXPECTED, self._model.device):
                expected = yield Expected(self._ids[:at])
                prior = prior if expected is None else expected
            leading = yield from self._along_tangent(at, trial)
            fresh = [*leading, *candidates(scores, prior, ladder[rung], [*trial.tokens, *leading])]
            own = _ITSELF * scores if at == 0 else prior
            while fresh:  # and what the likeliest of them could be mistaken for
                weighed = yield from self._try(at, fresh, trial, own, budget)
                fresh = self._mistakable(weighed.tokens[0], trial.tokens)
            if weighed is None:
                break
            self._rung = max(0, rung - 1)
            told = self._levels[self._sinks[at]].told or weighed.distances[0] <= self._target.radii[at]
            same = weighed.distances[0] == 0 and self._target.low is self._target.high  # none can be nearer
            if same or (weighed.confidence >= SURE and (told or rung > 1)):
                break
            if rung and self._noise is not None and self._is_clear(weighed):
                break
        assert weighed is not None, "a vocabulary has at least one token"
        while self._is_strange(at, weighed) and len(trial.tokens) < self._model.vocab_size:
            self._scans += len(trial.tokens) <= ladder[-1] + _ALIKE  # the first part of it
            fresh = candidates(scores, prior, len(trial.tokens) + _SCANNED, trial.tokens)
            weighed = yield from self._try(at, fresh, trial, own, budget)
        self._lost = self._lost + 1 if weighed.confidence < _NO_IDEA else 0
        self._tests[at] += len(trial.tokens)
        self._settle(at, weighed, trial.state(weighed.tokens[0]))

    def _is_clear(self, weighed: Weighed) -> bool:
        """Whether only tokens that were not tried could be likelier, and hardly are.

        In white noise one candidate is then so far ahead that more of them change how sure it is, seldom
        which it is: 256 or 1,024 cost ten times as much as 64 and named another token at one position of 60.
        """
        return weighed.confidence >= _CLEAR and weighed.share >= SURE

    def _along_tangent(self, at: int, trial: Trial) -> Asking[list[int]]:
        """Tokens to which the nearest that was tried leads, where no lens knows better."""
        if not (at and self._along_tangents and trial.tokens):
            return []
        order = yield Tangent(self._ids[:at], trial.nearest, self._target[at])
        return [] if order is None else sorted({*order[:LEADING].tolist()} - {*trial.tokens})

    def _try(self, at: int, tokens: list[int], trial: Trial, own: Tensor, budget: Budget) -> Asking[Weighed]:
        """Try more candidates at a position, and weigh them with those that were tried."""
        budget.check(len(tokens))
        places = torch.full((len(tokens),), at)
        _, seen = yield Branches(self._ids[:at], at, places, torch.tensor(tokens))
        budget.tests += len(tokens)
        trial.add(tokens, self._away(self._target[at], seen), seen)
        return self._weigh(at, trial.tokens, trial.distances, own[trial.tokens].cpu())

    def _is_strange(self, at: int, weighed: Weighed) -> bool:
        """Whether the likeliest token is far further off than right ones are, and hardly nearer than others.

        Then the right one may be one that a proposer ranks low, and the whole vocabulary is worth a scan. In
        white noise what is strange behind something strange, or behind a drowned beginning, is so for that.
        """
        known = at > 0 and self._weighed[at - 1] is None
        if self._noise is not None and not known and (at < 2 or not self._is_usual(at - 1)):
            return False
        level = self._levels[self._sinks[at]]
        second = min(weighed.distances[1:], default=math.inf)
        alone = second > _APART * weighed.distances[0]
        return (
            level.told and not alone and self._scans < _SCANS and level.strange(self._relative(at, weighed))
        )

    def _is_hopeless(self, at: int) -> bool:
        """Whether so little is sure, though there is no white noise, that more candidates hardly help."""
        read = [one for one in self._weighed[:at] if one is not None]
        unsure = sum(one.confidence < SURE for one in read)
        mixed = len(read) >= _SEVERAL and 2 * unsure > len(read) and not self._levels[False].white
        return mixed or self._lost >= _LOST

    def _is_usual(self, at: int) -> bool:
        """Whether a settled position is no further from what was seen than others are."""
        weighed = self._weighed[at]
        assert weighed is not None, "it was settled"
        return self._levels[self._sinks[at]].usual(self._relative(at, weighed))

    def _relative(self, at: int, weighed: Weighed) -> float:
        """How far the likeliest token is, relative to the state; no nearer than noise in any case is."""
        return math.hypot(weighed.distances[0], self._floor(at)) / self._lengths[at]

    def _floor(self, at: int) -> float:
        return self._target.radii[at] / _NOISY

    def _mistakable(self, token: int, tried: list[int]) -> list[int]:
        """Tokens of the same embedding, or of almost the same, that were not tried yet."""
        alike = (*self._lookalikes.twins(token), *self._lookalikes.near(token))
        return [other for other in alike if other not in set(tried)][:_ALIKE]

    def _settle(self, at: int, weighed: Weighed, state: Float[Tensor, " d"]) -> None:
        self._ids[at] = weighed.tokens[0]
        self._weighed[at] = weighed
        settled(self._ids.tolist, at + 1)
        residual = self._observed[at].double() - self._verifier.observe(state[None])[0].double()
        self._levels[self._sinks[at]].note(
            self._relative(at, weighed), self._statistics.coordinates(residual)
        )

    def _weigh(self, at: int, tokens: list[int], distances: Tensor, prior: Tensor) -> Weighed:
        return weigh(
            tokens, distances, prior, self._levels[self._sinks[at]],
            length=self._lengths[at], floor=self._floor(at), vocab_size=self._model.vocab_size,
        )  # fmt: skip

    def _away(self, target: Target, states: Tensor) -> Tensor:
        return target.away(self._verifier.observe(states)).cpu()

    def _conclude(self, known: int, finished: bool) -> Asking[Read]:
        """The prompt as it was read, and what a plain pass over the whole of it leaves unexplained."""
        states = (yield Rows(self._ids[None]))[0]
        confidence = [
            1.0 if at < known else _UNREAD if weighed is None else weighed.confidence
            for at, weighed in enumerate(self._weighed)
        ]
        return Read(
            self._ids.tolist(),
            confidence,
            self._away(self._exact, states).tolist(),
            self._weighed,
            self._statistics.coordinates(self._residual(states)),
            self._lengths,
            (self._away(self._target, states) / torch.tensor(self._lengths)).tolist(),
            self._target.radii,
            self._tilt,
            self._target.coarse,
            finished,
            self._tests,
        )
