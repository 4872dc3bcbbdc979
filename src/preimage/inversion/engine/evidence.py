"""Evidence: candidates weighed against one another, and against what noise explains.

States that were computed in another precision, kept in few bits or noised agree with no candidate exactly.
Which candidate made them is then a question of likelihood. Noise of unknown strength in n directions gives a
candidate at distance r the likelihood r^-n, so two candidates are compared by n log(r2 / r1): it takes no
guess of the strength. n is how many directions the differences that are left take part in: all for white
noise, few where another arithmetic computed the same prompt. A candidate that was never tried may still be
the right one: the other positions show how far a right candidate usually is, and the nearer this one comes to
that, compared with its rivals, the less room there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.proposers.statistics import loud_and_quiet, tilt_of

_CAUTION = 0.5  # share of the directions that is counted: noise is never quite white
_FEW = 24.0  # directions counted at most where what is left over is not white
_UNKNOWN = 12.0  # directions counted before anything was read
_LEVEL = 2.5  # white: at most so tilted
_TILT, _FLAT = 20.0, 4.0  # of what wrong tokens leave over: counted at most, and too flat to be told
_LUCK = 1.5  # noise is at most so many times as long as what is left over where it is shortest
_SEEN, _WHITE = 0.02, 0.3  # white noise to be counted on: its relative length, its share in quiet directions
_TAIL = 10.0  # degrees of freedom of the distribution of log distances: some positions are far noisier
_LEAST_SPREAD = 0.05  # of log distances
_UNKNOWN_SPREAD = 1.0  # before any position was read
_UNTRIED = 0.15, 16.0  # the chance that the right token is not among so many tried
_ALIKE = 0.15, 0.02  # log of how much nearer one wrong token is than the next: its scale, its least chance
_LEAST = 0.6  # of its usual length, that noise never falls short of
_SEED = 4  # positions that what was seen of noise beforehand counts for
_STRANGE, _STRANGELY = 4.0, 0.25  # spreads above it, and more in any case, that none is off
_USUAL = 1.5  # spreads above the centre up to which a distance is that of a right token


@dataclass
class Level:
    """How far right candidates are, as seen at the positions read so far, and how their residuals lie."""

    width: int
    tilt: float = _TILT  # of what wrong tokens leave over
    logs: list[float] = field(default_factory=list)  # of distance over length
    tilts: list[float] = field(default_factory=list)  # variance along directions of most and of least spread

    def expect(self, noise: Noise) -> None:
        """Take in beforehand that white noise was seen."""
        self.logs += [math.log(noise.relative)] * _SEED
        self.tilts += [1.0] * _SEED

    def note(self, relative: float, along: Float[Tensor, " d"]) -> None:
        """Take in a position that was read: its relative distance, and its residual by directions."""
        self.logs.append(math.log(max(relative, 1e-30)))
        self.tilts.append(float(tilt_of(along)))

    @property
    def told(self) -> bool:
        """Whether it is known how far right candidates are."""
        return len(self.logs) >= _SEED

    @property
    def white(self) -> bool:
        """Whether what is left over lies in all directions alike, those in which states differ or not."""
        return bool(self.tilts) and _median(self.tilts) <= _level(self.tilt)

    @property
    def directions(self) -> float:
        """How many independent directions what is left over counts for."""
        if not self.tilts:
            return min(_UNKNOWN, self.width)
        return _CAUTION * self.width if self.white else min(_FEW, _CAUTION * self.width)

    @property
    def centre(self) -> float:
        """The usual relative distance of a right candidate."""
        return math.exp(_median(self.logs)) if self.logs else math.nan

    @property
    def spread(self) -> float:
        """How much the logarithm of that varies from position to position."""
        if len(self.logs) < 2:
            return _UNKNOWN_SPREAD
        middle = _median(self.logs)
        deviation = 1.5 * _median([abs(one - middle) for one in self.logs])
        known = len(self.logs) / (len(self.logs) + 2)
        return max(_LEAST_SPREAD, known * deviation + (1 - known) * _UNKNOWN_SPREAD / 2)

    def usual(self, relative: float) -> bool:
        """Whether a right candidate is as far as this at other positions."""
        if not self.logs:
            return False
        return math.log(max(relative, 1e-30)) <= _median(self.logs) + _USUAL * self.spread

    def strange(self, relative: float) -> bool:
        """Whether no right candidate was nearly as far as this."""
        above = math.log(max(relative, 1e-30)) - _median(self.logs)
        return above > max(_STRANGE * self.spread, _STRANGELY)


@dataclass(frozen=True)
class Weighed:
    """Candidates at one position, weighed: the best, how sure it is, and the others by their log odds."""

    tokens: list[int]  # likeliest first
    scores: list[float]  # log likelihood with the prior, up to a constant
    distances: list[float]
    confidence: float
    gap: float  # nats between the nearest and the second nearest, the prior left out

    @property
    def share(self) -> float:
        """How sure the best would be, were the right one among those tried."""
        return 1 / sum(math.exp(score - self.scores[0]) for score in self.scores)

    def cut(self, count: int) -> Weighed:
        """The likeliest of them."""
        return replace(
            self, tokens=self.tokens[:count], scores=self.scores[:count], distances=self.distances[:count]
        )


@dataclass
class Read:
    """A prompt as it was read."""

    ids: list[int]
    confidence: list[float]
    distances: list[float]  # of one plain pass over the whole
    weighed: list[Weighed | None]  # None at known positions
    residuals: Float[Tensor, "position d"]  # along principal directions
    lengths: list[float]  # of the observed states
    relative: list[float]  # how far they are off, relative to these
    radii: list[float]  # within which a distance is noise of an exact recomputation
    tilt: float  # of what wrong tokens leave over
    coarse: int  # positions known so coarsely that a token that fits may not be the only one
    finished: bool = True
    tests: list[int] = field(default_factory=list)


def weigh(
    tokens: list[int],
    distances: Float[Tensor, " candidate"],
    prior: Float[Tensor, " candidate"],
    level: Level,
    *,
    length: float,
    floor: float,
    vocab_size: int,
) -> Weighed:
    """Weigh candidates at a position whose state is so long; ``floor``: a distance that is noise anyway."""
    squares = distances.double().square() + floor**2
    likelihood = -0.5 * level.directions * squares.log()
    scores = likelihood + prior.double()
    order = scores.argsort(descending=True)
    best = int(order[0])
    shares = (scores - scores[best]).softmax(dim=0)
    near = likelihood.sort(descending=True).values
    gap = float(near[0] - near[1]) if len(near) > 1 else 0.0
    untried = _room(squares, best, level, length, len(tokens) >= vocab_size, len(tokens))
    return Weighed(
        [tokens[i] for i in order.tolist()],
        scores[order].tolist(),
        distances[order].tolist(),
        float(shares[best]) / (1 + untried),
        gap,
    )


class Noise(NamedTuple):
    """White noise, as what is left over shows it."""

    relative: float  # its length, relative to that of the states
    white: bool  # whether there is enough of it to be counted on

    def allows(self, away: float, length: float, usual: float) -> bool:
        """Whether a state so long may be so near: the length of noise hardly varies.

        It is the same at every position, or in proportion to states; ``usual``: the length of most of them.
        """
        return away >= _LEAST * self.relative * min(length, usual)

    def refuted(
        self, weighed: Sequence[Weighed | None], lengths: Sequence[float], sinks: Sequence[bool]
    ) -> bool:
        """Whether something was read, at a position that is no sink, that such noise does not allow."""
        usual = _median(list(lengths))
        return any(
            not self.allows(one.distances[0], length, usual)
            for one, length, sink in zip(weighed, lengths, sinks, strict=True)
            if one is not None and not sink
        )


def noise_of_residual(
    along: Float[Tensor, "position d"], lengths: Float[Tensor, " position"], tilt: float
) -> Noise:
    """The white noise in what is left over at positions whose tokens may be right or wrong.

    Wrong tokens leave something over too, along the directions in which states differ most: how much is seen
    there, and its part in the quiet directions is taken off. ``tilt``: how unevenly it lies here. Noise is at
    every position: where little is left over, there is little of it.
    """
    if tilt < _FLAT:
        return Noise(0.0, False)
    loud, quiet = loud_and_quiet(along)
    variance = (quiet - (loud - quiet).clamp_min(0) / (min(tilt, _TILT) - 1)).clamp_min(0)
    shortest = float((along.norm(dim=-1) / lengths).quantile(0.1))
    relative = min(float(((variance * along.shape[-1]).sqrt() / lengths).median()), _LUCK * shortest)
    return Noise(relative, relative > _SEEN and float((variance / quiet).median()) > _WHITE)


def is_white(along: Float[Tensor, "position d"], tilt: float) -> bool:
    """Whether what is left over at most positions lies in all directions alike, unlike what is of tokens."""
    return float(tilt_of(along).median()) <= _level(tilt)


def _level(tilt: float) -> float:
    return min(_LEVEL, math.sqrt(tilt))


def untried(tried: int) -> float:
    """The chance that the right token is not among so many of the likeliest."""
    chance, few = _UNTRIED
    return chance * math.sqrt(min(1.0, few / max(1, tried)))


def _room(squares: Tensor, best: int, level: Level, length: float, whole: bool, tried: int) -> float:
    """Odds that none of the candidates tried is the right one."""
    if whole:
        return 0.0
    chance = untried(tried)
    if tried < 2:
        return chance
    own = 0.5 * math.log(float(squares[best]))
    others = squares.clone()
    others[best] = torch.inf
    apart = max(0.0, 0.5 * math.log(float(others.min())) - own)
    # nearer than usual is no evidence of its own: noise has its luck
    above = max(0.0, own - math.log(length) - _median(level.logs)) if level.logs else 0.0
    scale, least = _ALIKE
    chance *= max(least, math.exp(-apart / scale))  # were all wrong, the best would hardly be so much nearer
    # what a right candidate's distance would have to be for this, and what a wrong one's
    return chance * _density((above - apart) / level.spread) / _density(above / level.spread)


def _density(deviation: float) -> float:
    return float((1 + deviation**2 / _TAIL) ** (-(_TAIL + 1) / 2))


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
