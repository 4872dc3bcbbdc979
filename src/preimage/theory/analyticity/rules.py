"""Rules for operations: given a call, which values its result may take, or what is not analytic about it.

That a sum, a product or an exponential is analytic needs no words; what is said here is where roots,
quotients and powers are, and on which side of a kink an argument stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from preimage.theory.analyticity.ranges import (
    ANY,
    Range,
    added,
    constant,
    inverted,
    multiplied,
    negated,
    rising,
    squared,
    summed,
    union,
)

ACTIVATION, ROUTING, CLIPPING, QUANTISED = "activation", "routing", "clipping", "quantised"
DOMAIN, DROPOUT, OTHER = "domain", "dropout", "known"
STATEMENTS = {  # what is said where there is no break of a kind
    ACTIVATION: "no activation has a kink",
    ROUTING: "no routing chooses among experts",
    CLIPPING: "nothing is clipped",
    QUANTISED: "no weight is quantised",
    DOMAIN: "every norm has eps > 0, and nothing else divides by 0 or takes its root",
    DROPOUT: "no dropout acts",
    OTHER: "everything that runs is known",
}
JUMP, STEP = "a jump", "a step function"


@dataclass(frozen=True)
class Break:
    """What is not analytic about a call; ``analytic`` is None where that is not known."""

    kind: str
    analytic: bool | None
    reason: str
    values: Range = ANY  # of the result
    stepped: bool = False  # whether the result is constant between jumps


@dataclass(frozen=True)
class Call:
    """One call of an operation: its arguments by name, and the values each may have."""

    name: str
    given: dict[str, Any]
    range_of: Callable[[Any], Range]

    def range(self, name: str) -> Range:
        """The values of one argument, a tensor's or a number's."""
        return self.range_of(self.given[name])

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, those of lists too."""
        lists = (value if isinstance(value, list | tuple) else [value] for value in self.given.values())
        return [one for values in lists for one in values if isinstance(one, Tensor)]


Rule: TypeAlias = Callable[[Call], Range | Break]


def moved(call: Call) -> Range:
    """Entries are taken from the arguments, as they are; integers only say which."""
    tensors = call.tensors()
    values = [one for one in tensors if one.is_floating_point() or one.is_complex()]
    return union(map(call.range_of, values or tensors))


def moved_or(call: Call, *, name: str | None = None) -> Range | Break:
    """The same, with a number at some places: 0, or an argument."""
    if call.given.get("reduce") is not None:
        return Break(OTHER, None, f"{call.name} with reduce is not known")
    value = 0.0 if name is None else call.given.get(name)
    if value is None or isinstance(value, Tensor | str):
        value = 0.0
    return union([moved(call), constant(float(value))])


def put(call: Call) -> Range:
    """Entries written at some places, or added to what is there."""
    values = union([call.range("self"), call.range("values")])
    return summed(union([values, constant(0.0)])) if call.given.get("accumulate") else values


def converted(call: Call) -> Range | Break:
    """The same numbers in another type: steps where it is one of few bits."""
    kind = call.given.get("dtype")
    real = isinstance(kind, torch.dtype) and (kind.is_floating_point or kind.is_complex)
    if isinstance(kind, torch.dtype) and (kind.itemsize < 2 or not real):
        return Break(QUANTISED, False, f"a conversion to {kind}: a step function")
    if kind is not None and call.name == "view":
        return Break(OTHER, None, "the bits of a number are read as another type")
    return call.range("self")


def total(call: Call) -> Range:
    """The sum of some entries, or of none."""
    values = moved(call)
    empty = any(tensor.numel() == 0 for tensor in call.tensors())
    return summed(union([values, constant(0.0)]) if empty else values)


def added_up(call: Call, *, x: str = "self", y: str = "other", sign: float = 1.0) -> Range:
    """x + sign alpha y."""
    alpha = call.given.get("alpha")
    factor = constant(sign * (1.0 if alpha is None else float(alpha)))
    return added(call.range(x), multiplied(factor, call.range(y)))


def product(call: Call) -> Range | Break:
    """x y, or x^2 where both are the same."""
    one, other = call.given["self"], call.given["other"]
    if _same(one, other):
        return squared(call.range("self"))
    first, second = call.range("self"), call.range("other")
    if (first.has_infinity and not _one_sign(second)) or (second.has_infinity and not _one_sign(first)):
        return Break(DOMAIN, None, f"{call.name} by what may be infinite")
    return multiplied(first, second)


def _one_sign(values: Range) -> bool:
    return values.positive or negated(values).positive


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are the same entries in the same order."""
    if one is other:
        return True
    if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in (one, other)):
        return False
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return places[0] == places[1] and one.numel() > 0 and not one.is_meta


def quotient(call: Call) -> Range | Break:
    """x / y, where y is never 0."""
    if call.given.get("rounding_mode") is not None:
        return Break(QUANTISED, False, f"{call.name} with rounding: a step function")
    above, below = call.range("self"), call.range("other")
    if below.has_zero:
        return Break(DOMAIN, False, f"{call.name} by what may be 0")
    return multiplied(above, inverted(below))


def inverse(call: Call) -> Range | Break:
    """1 / x, where x is never 0."""
    values = call.range("self")
    return Break(DOMAIN, False, f"{call.name} of what may be 0") if values.has_zero else inverted(values)


def root(call: Call, *, inverse: bool) -> Range | Break:
    """sqrt(x) or its inverse, where x is above 0."""
    values = call.range("self")
    if not values.positive:
        return Break(DOMAIN, False, f"{call.name} of what may be 0: eps = 0, or none")
    root = rising(math.sqrt, values)
    return inverted(root) if inverse else root


def logarithm(call: Call, *, shift: float = 0.0) -> Range | Break:
    """log(x + shift), where that is above 0."""
    values = added(call.range("self"), constant(shift))
    if not values.positive:
        return Break(DOMAIN, False, f"{call.name} of what may be 0")
    return rising(lambda value: math.log(value) if value else -math.inf, values)


def power(call: Call) -> Range | Break:
    """x^n is analytic for whole n >= 0, for others where x is not 0, and x^y where x is above 0."""
    base, exponent = call.range("self"), call.range("exponent")
    if exponent.low != exponent.high or not exponent.low.is_integer():
        if not base.positive:
            return Break(DOMAIN, False, "a power, not a whole one, of what may be 0")
        return Range(0.0, math.inf)
    whole = int(exponent.low)
    if whole < 0 and base.has_zero:
        return Break(DOMAIN, False, f"a power of {whole} of what may be 0")
    if whole in (0, 1, 2):
        return (constant(1.0), base, squared(base))[whole]
    return Range(0.0, math.inf, base.has_zero) if whole % 2 == 0 or base.positive else ANY


def normed(call: Call) -> Range | Break:
    """A norm divides by sqrt(something + eps): analytic for eps > 0."""
    eps = call.given.get("eps")
    if eps is None or float(eps) > 0:
        return ANY
    return Break(DOMAIN, False, f"{call.name} with eps = {eps:g}: not analytic where its input has no spread")


def piecewise(call: Call, *, reason: str = "a kink at 0") -> Range | Break:
    """Two pieces that meet at 0: analytic where the argument stays on one side of it."""
    values = call.range("self")
    if not (values.low >= 0 or values.high <= 0):
        return Break(ACTIVATION, False, f"{call.name}: {reason}")
    if call.name not in ("abs", "relu"):
        return ANY
    return values if values.low >= 0 else negated(values) if call.name == "abs" else constant(0.0)


def clipped(call: Call) -> Range | Break:
    """Analytic where no value lies beyond the limits."""
    values = call.range("self")
    for name in ("min", "max"):
        if call.given.get(name) is None:
            continue
        ends = call.range(name)
        if not (ends.high <= values.low if name == "min" else ends.low >= values.high):
            low, high = (call.range_of(call.given.get(end)) for end in ("min", "max"))
            inside = Range(max(low.low, values.low), min(high.high, values.high), True, True)
            return Break(CLIPPING, False, f"{call.name}: constant outside a range", inside)
    return values


def larger(call: Call) -> Range | Break:
    """Analytic where one is always the larger."""
    one, other = call.range("self"), call.range("other")
    if one.low >= other.high or other.low >= one.high:
        return union([one, other])
    return Break(ACTIVATION, False, f"{call.name}: a kink where both are equal")


def chosen(call: Call) -> Range | Break:
    """Which entries are the largest jumps."""
    k, entries, dim = call.given.get("k"), call.given["self"], call.given.get("dim")
    values = call.range("self")
    if k is not None and entries.ndim and k >= entries.shape[-1 if dim is None else dim]:
        return Break(ROUTING, None, f"{call.name} takes every entry, in an order that jumps", values)
    return Break(ROUTING, False, f"{call.name}: which entries are taken jumps", values)


def broken(call: Call, *, kind: str, analytic: bool | None, reason: str) -> Break:
    """Analytic nowhere, or not known to be."""
    return Break(kind, analytic, f"{call.name}: {reason}", stepped=reason in (JUMP, STEP))


def solved(call: Call) -> Range | Break:
    """A triangular system, whose diagonal has to be 1."""
    if call.given.get("unitriangular"):
        return ANY  # sums of products: the diagonal is 1
    return Break(DOMAIN, None, f"{call.name} with a diagonal that may be 0")


def function(call: Call, *, values: Callable[[Range], Range]) -> Range:
    """A function whose values are known."""
    return values(call.range("self"))


def logistic(value: float) -> float:
    """The sigmoid."""
    return 0.0 if value < -700 else 1 / (1 + math.exp(-value))


def above_zero(values: Range) -> Range:
    """Exponentials: 0 itself only where a mask is infinite."""
    return Range(0.0, math.inf, values.low_met and math.isinf(values.low), False)
