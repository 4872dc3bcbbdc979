"""Which values a tensor may take, whatever the parameters are: intervals with open or closed ends.

Analyticity of a root, a logarithm or a quotient is a question of where its argument may lie: rsqrt(m + eps)
is analytic because a mean of squares is never below 0, sqrt(1 - a^2) because a sigmoid stays below 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_LIMIT = torch.finfo(torch.bfloat16).max


class Range(NamedTuple):
    """All values lie between ``low`` and ``high``; ``_met`` says whether an end itself may be taken."""

    low: float = -math.inf
    high: float = math.inf
    low_met: bool = False
    high_met: bool = False

    @property
    def positive(self) -> bool:
        """Whether every value is above 0."""
        return self.low > 0 or (self.low == 0 and not self.low_met)

    @property
    def has_zero(self) -> bool:
        """Whether 0 may be among the values."""
        return not self.positive and not negated(self).positive

    @property
    def has_infinity(self) -> bool:
        """Whether an infinite value, such as a mask's, is really among them."""
        return (self.low_met and math.isinf(self.low)) or (self.high_met and math.isinf(self.high))


ANY = Range()


def constant(value: float) -> Range:
    """One number."""
    return Range(value, value, True, True)


def closed(low: float, high: float) -> Range:
    """From one number to another, both included."""
    return Range(low, high, True, True)


def of_values(tensor: Tensor) -> Range:
    """The values that a tensor which depends on no parameter does take; its type's limit is a mask's."""
    if tensor.numel() == 0:
        return constant(0.0)
    if tensor.is_complex() or tensor.is_meta:
        return ANY
    if tensor.dtype == torch.bool:
        return closed(0.0, 1.0)
    low, high = (float(end) for end in tensor.aminmax())
    if math.isnan(low) or math.isnan(high):
        return ANY
    limit = torch.finfo(tensor.dtype).max if tensor.is_floating_point() else math.inf
    ends = [math.copysign(math.inf, end) if abs(end) >= limit else end for end in (low, high)]
    return closed(*ends)


def of_number(value: float) -> Range:
    """A number of Python; one at the limits of float32 or bf16 is a mask's, and stands for infinity."""
    return constant(math.copysign(math.inf, value) if abs(value) >= _LIMIT else value)


def union(ranges: Iterable[Range]) -> Range:
    """Values that lie in one of several ranges."""
    several = list(ranges)
    return _hull([(one.low, one.low_met) for one in several], [(one.high, one.high_met) for one in several])


def _hull(lows: list[tuple[float, bool]], highs: list[tuple[float, bool]]) -> Range:
    """From the least of some ends to the largest of others; each with whether it may itself be taken."""
    low, high = min(end for end, _ in lows), max(end for end, _ in highs)
    return Range(low, high, (low, True) in lows, (high, True) in highs)


def negated(one: Range) -> Range:
    """-x."""
    return Range(-one.high, -one.low, one.high_met, one.low_met)


def added(one: Range, other: Range) -> Range:
    """x + y."""
    low, high = one.low + other.low, one.high + other.high
    low, high = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    return Range(low, high, one.low_met and other.low_met, one.high_met and other.high_met)


def multiplied(one: Range, other: Range) -> Range:
    """x y; an infinite end is never reached, so that 0 times it is 0."""
    ends = []
    for first, first_met in ((one.low, one.low_met), (one.high, one.high_met)):
        for second, second_met in ((other.low, other.low_met), (other.high, other.high_met)):
            nothing = (first == 0 and first_met) or (second == 0 and second_met)
            product = 0.0 if 0 in (first, second) else first * second
            ends.append((product, nothing or (first_met and second_met)))
    return _hull(ends, ends)


def summed(one: Range) -> Range:
    """The sum of one or more values."""
    low, high = one.low if one.low >= 0 else -math.inf, one.high if one.high <= 0 else math.inf
    return Range(low, high, one.low_met and low == one.low, one.high_met and high == one.high)


def inverted(one: Range) -> Range:
    """1 / x, of a range without 0."""
    if one.positive:
        low = 0.0 if math.isinf(one.high) else 1 / one.high
        high = math.inf if one.low == 0 else 1 / one.low
        return Range(low, high, one.high_met, one.low_met)
    return negated(inverted(negated(one)))


def squared(one: Range) -> Range:
    """x^2."""
    if one.high <= 0:
        one = negated(one)
    if one.low >= 0:
        return Range(one.low * one.low, one.high * one.high, one.low_met, one.high_met)
    high = max(-one.low, one.high)
    met = (one.low_met and -one.low == high) or (one.high_met and one.high == high)
    return Range(0.0, high * high, True, met)


def rising(function: Callable[[float], float], one: Range) -> Range:
    """The values of a strictly increasing function."""

    def at(value: float, beyond: float) -> float:
        try:
            return function(value)
        except OverflowError:
            return beyond

    low, high = at(one.low, -math.inf), at(one.high, math.inf)
    return Range(low, high, one.low_met, one.high_met)
