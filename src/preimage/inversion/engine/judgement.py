"""Is a reading likely? Whether noise explains what it leaves over, and whether tokens stand out of it.

Averages of states, steered states, states of other models and random ones have a nearest token everywhere
too. What tells them from noisy states of a prompt is what is left over: noise is white, another arithmetic
leaves little compared with the distances between tokens; anything else points along the directions in which
states differ, or the same way at every position.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.evidence import Read, is_white
from preimage.inversion.result import Inversion

_MOST = 0.95  # of the states' length, that noise may be off
_SEVERAL = 8  # ordinary positions without which noise cannot be told from anything else
_ARITHMETIC = 0.25  # of the states' length, that another precision or engine may be off
_EVEN = 0.25  # how much the logarithm of the length of noise varies over positions
_APART = 3.0  # times as far as the nearest token are others, where what is left over is not white
_GAP, _GAP_OF_ONE = 4.0, 8.0  # nats between nearest and next, at the median position; more for few positions
_CHANCE = 4.0  # standard deviations by which directions of noise may agree
_EARLY, _ODD = 4, 3.0  # first positions that are so many times as far off as later ones
_CONFIDENCE = 0.9  # at the median position
_DOUBTFUL = 0.9  # no position of a reading that is not likely is called surer than this


class Judgement(NamedTuple):
    """Whether a reading is likely, and in words why, or why not."""

    likely: bool
    words: str
    noise: bool = False  # noise explains what is left over, and nothing is that all positions have in common


def judge(read: Read, known: int, *, coarse: bool = False) -> Judgement:
    """Judge a reading behind some known positions; in ``coarse`` arithmetic nothing fits exactly."""
    weighed = [one for one in read.weighed[known:] if one is not None]
    if not read.finished or not weighed:
        return Judgement(False, "The budget was spent before every position was read.")
    relative = statistics.median(read.relative[known:])
    off = f"The states are {100 * relative:.2g} % of their length off those of the likeliest prompt"
    gap = statistics.median(one.gap for one in weighed)
    pairs = zip(read.distances[known:], read.radii[known:], strict=True)
    exact = sum(away <= radius for away, radius in pairs)
    if exact > len(read.distances[known:]) / 2 and not coarse:
        return Judgement(False, f"{exact} positions fit exactly, and others were changed.")
    if relative > _MOST:
        return Judgement(False, f"{off}: no prompt explains anything of them.")
    if gap < _GAP + _GAP_OF_ONE / len(weighed) or not stands_out(read, known):
        return Judgement(False, f"{off}, and no token stands out: no prompt is likely to have made them.")
    rows = _ordinary(read, known)
    share = float(rows.mean(dim=0).square().sum()) if len(rows) > 1 else 0.0
    if len(rows) > 1 and share > 0.5 * (1 + 1 / len(rows)):
        return Judgement(False, f"{off}, by the same vector at every position: something was added to them.")
    if len(rows) >= _SEVERAL and is_white(rows, read.tilt) and _even(read, known):
        words = f"{off}, in all directions alike: noise."
        return Judgement(True, words, noise=_in_common(rows) <= _CHANCE)
    apart = statistics.median(_ratio(one.distances) for one in weighed)
    if apart >= _APART and relative <= _ARITHMETIC and len(weighed) > 1:  # one state alone may be anything
        return Judgement(
            True,
            f"{off}, and other tokens are {apart:.3g} times as far: another precision or engine made them.",
        )
    return Judgement(
        False, f"{off}, along the directions in which states differ: they are a mixture, or were changed."
    )


def begins_oddly(result: Inversion) -> bool:
    """Whether a likely prompt is far further off right behind its first token than later.

    Noise is not; a wrong first token is, in states without any.
    """
    away = [position.distance / max(position.radius, 1e-300) for position in result.positions[1:]]
    early, late = away[:_EARLY], away[_EARLY:]
    return len(late) >= _EARLY and statistics.median(early) > _ODD * statistics.median(late)


def stands_out(read: Read, known: int) -> bool:
    """Whether the tokens of a reading are sure, whatever it leaves over."""
    return statistics.median(read.confidence[known:]) >= _CONFIDENCE


def cautious(confidence: list[float], known: int) -> list[float]:
    """The confidence of a reading that is not likely."""
    return confidence[:known] + [min(one, _DOUBTFUL) for one in confidence[known:]]


def _ratio(distances: list[float]) -> float:
    ordered = sorted(distances)
    return ordered[1] / max(ordered[0], 1e-30) if len(ordered) > 1 else 1.0


def _even(read: Read, known: int) -> bool:
    """Whether what is left over is about as long at every position, as it is or relative to the state."""
    lengths = torch.tensor(read.lengths[known:], dtype=torch.float64)
    away = read.residuals[known:].cpu().norm(dim=1).clamp_min(1e-300)
    some = lengths <= 4 * lengths.median()
    return any(_spread(logs[some]) <= _EVEN for logs in (away.log(), (away / lengths).log()))


def _spread(values: Float[Tensor, " position"]) -> float:
    """A standard deviation that does not mind some positions."""
    return 1.5 * float((values - values.median()).abs().median())


def _in_common(directions: Float[Tensor, "position d"]) -> float:
    """How much positions agree: the sum of their cosines, in standard deviations of that of noise."""
    count, width = directions.shape
    cosines = 0.5 * (float(directions.sum(dim=0).square().sum()) - count)
    return cosines / math.sqrt(max(1, count * (count - 1) / 2) / width)


def _ordinary(read: Read, known: int) -> Float[Tensor, "position d"]:
    """The directions of what is left over at positions that are no sinks."""
    lengths = torch.tensor(read.lengths[known:], dtype=torch.float64)
    rows = read.residuals[known:].cpu()[lengths <= 4 * lengths.median()]
    directions: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return directions
