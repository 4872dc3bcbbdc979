"""Numbers that are codes times a step: finding the step, and the cells that the codes stand for.

Every group of numbers that shares a scale (a token's, a channel's, all) has its step in its largest number:
that is so many steps. Then every other number must be a code times the step, within its own rounding. How
unlikely that is by chance is counted in bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from preimage.states.observation import rounding_cell

SINGLE = 2.0**-24  # rounding of float32, in which scales are multiplied
SLACK = 2.5  # roundings that lie between a number and its code's: its own, the scale's
_BEYOND_DOUBT = 30.0  # bits: by chance, numbers are multiples of a step once in so many powers of two
_NAMED = 20.0  # the same where the codec was named
_GROUPS = (32, 64, 128)  # coordinates that share a scale in caches
_SAMPLE = 16  # numbers of a group that are looked at first
_LAST = 4  # groups that are looked at first
_WHOLE = 3  # granularities with fixed scales: tensor, token, channel
_TESTS = 2**17  # numbers held against a step at once
_ROUNDS = 16  # candidates for a step that fit a few numbers and are held against all


def coded_cells(
    numbers: Float[Tensor, "position width"], stored: str | None, unit: float
) -> tuple[Tensor, Tensor, str] | None:
    """The ends of every number's cell and the name of the codec; None where the numbers are no codes.

    ``stored``: "int4", "int8" or "fp8"; None tries all. ``unit``: the relative rounding of the numbers.
    """
    grouped = [_Groups(name, group.apart(numbers), group) for name, group in _granularities(*numbers.shape)]
    for codec, kind in _trials(stored):
        for groups in grouped[:_WHOLE] if kind.fixed else grouped:
            if not _worth_trying(groups.values, codec, kind, unit):
                continue
            cells = _coded(groups.values, codec, kind, unit, _BEYOND_DOUBT if stored is None else _NAMED)
            if cells is not None:
                low, high = map(groups.grouping.together, cells)
                return low, high, f"{codec.name} {groups.name}{kind.words}"
    return None


class _Codec(NamedTuple):
    """Which codes there are, in units of a step: whole numbers up to ``top``, or those of a float type."""

    name: str
    top: float
    dtype: torch.dtype | None = None

    def nearest(self, units: Tensor) -> Tensor:
        """The code that is nearest to a number of steps."""
        if self.dtype is None:
            return units.round()
        return units.clamp(-self.top, self.top).to(self.dtype).to(torch.float64)

    def around(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """How far the cell of each code goes down and up, in steps."""
        if self.dtype is None:
            return torch.full_like(codes, 0.5), torch.full_like(codes, 0.5)
        low, high = rounding_cell(codes.to(self.dtype))
        return codes - low, high - codes


class _Kind(NamedTuple):
    """How a step follows from a group's numbers: so many steps, one of ``counts``, are its largest size.

    ``spread``: from its least to its largest number instead. ``offset``: codes count from its least number.
    """

    words: str
    counts: tuple[float, ...]
    spread: bool = False
    offset: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the step was chosen without these numbers: the largest need not have the last code."""
        return "fixed" in self.words


def _kinds(codec: _Codec) -> tuple[_Kind, ...]:
    """From the most usual to the rarest; coarse steps before fine ones, whose cells are narrower."""
    top = codec.top
    if codec.dtype is not None:
        codes = torch.arange(1, 127, dtype=torch.uint8).view(codec.dtype).to(torch.float64)
        every = tuple(codes[(codes > 0) & (codes <= top)].tolist())
        octaves = tuple(code for code in every if math.log2(top / code).is_integer())
        return _Kind("", octaves), _Kind(" of a fixed scale", every)
    whole = 2 * top + 1
    return (
        _Kind("", (top, top + 1)),
        _Kind(" with a zero point", (whole, whole - 1, whole + 1), spread=True),
        _Kind(" with an offset", (whole,), spread=True, offset=True),
        _Kind(" of a fixed scale", tuple(range(1, int(top) + 1))),
    )


_CODECS = {
    "int4": (_Codec("int4", 7.0),),
    "int8": (_Codec("int8", 127.0),),
    "fp8": (_Codec("fp8 e5m2", 57344.0, torch.float8_e5m2), _Codec("fp8 e4m3", 448.0, torch.float8_e4m3fn)),
}


def _trials(stored: str | None) -> Iterator[tuple[_Codec, _Kind]]:
    """Codecs and kinds in the order in which they are tried: coarse ones first, fixed scales last."""
    codecs = [codec for name, some in _CODECS.items() if stored in (None, name) for codec in some]
    pairs = [(codec, kind) for codec in codecs for kind in _kinds(codec)]
    yield from sorted(pairs, key=lambda pair: pair[1].fixed)


class _Grouping(NamedTuple):
    """Numbers (position x width) as groups that share a scale (group x number), and back."""

    apart: Callable[[Tensor], Tensor]
    together: Callable[[Tensor], Tensor]


def _granularities(positions: int, width: int) -> Iterator[tuple[str, _Grouping]]:
    def back(numbers: Tensor) -> Tensor:
        return numbers.reshape(positions, width)

    yield "per tensor", _Grouping(lambda x: x.reshape(1, -1), back)
    yield "per token", _Grouping(lambda x: x, back)
    yield "per channel", _Grouping(lambda x: x.T, lambda x: x.T)
    for size in _GROUPS:
        if width % size == 0 and width > size:
            name = f"per group of {size}"
            yield name, _Grouping(lambda x, size=size: x.reshape(-1, size), back)  # type: ignore[misc]


class _Groups(NamedTuple):
    name: str
    values: Float[Tensor, "group number"]
    grouping: _Grouping


class _Measured(NamedTuple):
    """Groups of numbers under one hypothesis: counted from where, how well known, and which steps may be."""

    least: Float[Tensor, "group 1"]
    largest: Float[Tensor, "group 1"]
    flat: Bool[Tensor, "group 1"]  # nothing but zeros, or one number: any step may have made it
    counted: Float[Tensor, "group number"]
    slack: Float[Tensor, "group number"]
    steps: Float[Tensor, "group candidate"]


def _measure(values: Float[Tensor, "group number"], kind: _Kind, unit: float) -> _Measured:
    least, largest = values.amin(dim=1, keepdim=True), values.amax(dim=1, keepdim=True)
    size = largest - least if kind.spread else torch.maximum(-least, largest)
    flat = size == 0
    size = torch.where(flat, 1.0, size)
    slack = unit * values.abs() + unit * torch.finfo(torch.float16).tiny  # numbers so small have fewer digits
    if kind.offset:
        slack = slack + unit * size
    if kind.spread:
        slack = slack + 2 * SINGLE * size
    counts = torch.tensor(kind.counts, dtype=torch.float64)
    steps = size / counts
    if kind.spread and not kind.offset:  # the range that codes span has 0 in it, or need not have
        with_zero = largest.clamp_min(0.0) - least.clamp_max(0.0)
        steps = torch.cat([steps, torch.where(flat, 1.0, with_zero) / counts], dim=1)
    counted = values - least if kind.offset else values
    return _Measured(least, largest, flat, counted, slack, steps)


def _worth_trying(values: Float[Tensor, "group number"], codec: _Codec, kind: _Kind, unit: float) -> bool:
    """Whether the last few groups fit; most hypotheses end here."""
    last = _measure(values[-_LAST:], kind, unit)
    return _choose_steps(last.counted, last.slack, last.steps, codec) is not None


def _coded(
    values: Float[Tensor, "group number"], codec: _Codec, kind: _Kind, unit: float, needed: float
) -> tuple[Tensor, Tensor] | None:
    """Cells under one hypothesis; None where a number does not fit, or where that may be chance."""
    least, largest, flat, counted, slack, steps = _measure(values, kind, unit)
    step = _choose_steps(counted, slack, steps, codec)
    if step is None or bool(flat.all()):
        return None
    units = counted / step
    codes = codec.nearest(units)
    below, above = codec.around(codes)
    if kind.spread:
        first, last = values == least, values == largest
    else:
        end = torch.full_like(step, codec.top)
        if not kind.fixed:  # in half precision steps of 1/127 and 1/128 are hard to tell
            end = codes.abs().amax(dim=1, keepdim=True).clamp_max(codec.top) * (1 - 4 * unit)
        first, last = ((sign * codes >= end) & (end > 0) for sign in (-1, 1))
    telling = (codes != 0) & (units.abs() < units.abs().amax(dim=1, keepdim=True)) & ~flat
    if kind.spread:
        telling &= ~(first | last)
    bits = -(2 * _tolerance(units, slack, step) / (below + above)).log2().clamp_max(0.0)
    price = math.log2(steps.shape[1]) * int(telling.any(dim=1).sum())  # of the choice of each group's step
    if _evidence(codes, bits, telling) - price < needed:
        return None
    wide = step * (1 + 4 * unit) * (_common_divisor(codes) if codec.dtype is None else 1)
    low, high = values - below * wide - 1.01 * slack, values + above * wide + 1.01 * slack
    return low.masked_fill(first | flat, -math.inf), high.masked_fill(last | flat, math.inf)


def _evidence(
    codes: Float[Tensor, "group number"],
    bits: Float[Tensor, "group number"],
    telling: Bool[Tensor, "group number"],
) -> float:
    """How unlikely it is, in bits, that numbers fall so near to codes by chance; each code counts once."""
    order = codes.masked_fill(~telling, 0.0).sort(dim=1)
    fresh = order.values != 0
    fresh[:, 1:] &= order.values[:, 1:] != order.values[:, :-1]
    return float((bits.gather(1, order.indices) * fresh).sum())


def _common_divisor(codes: Float[Tensor, "group number"]) -> Float[Tensor, "group 1"]:
    """The largest whole number of steps that could be the step: few codes tell no more than that."""
    divisor = codes.abs().long()
    while divisor.shape[1] > 1:
        half = divisor.shape[1] // 2
        first, second, rest = divisor[:, :half], divisor[:, half : 2 * half], divisor[:, 2 * half :]
        divisor = torch.cat([torch.gcd(first, second), rest], dim=1)
    return divisor.clamp_min(1).to(torch.float64)


def _tolerance(units: Tensor, slack: Tensor, step: Tensor) -> Tensor:
    """How far from its code a number may lie, in steps."""
    return SLACK * (slack / step + SINGLE * units.abs())


def _choose_steps(
    values: Float[Tensor, "group number"],
    slack: Float[Tensor, "group number"],
    steps: Float[Tensor, "group candidate"],
    codec: _Codec,
) -> Float[Tensor, "group 1"] | None:
    """The first candidate in each group that makes every number a code; None where a group has none.

    A few numbers of each are held against all candidates, then all numbers against the first that is left.
    """

    def fits(values: Tensor, slack: Tensor, step: Tensor) -> Tensor:
        units = values / step
        return (units - codec.nearest(units)).abs() <= _tolerance(units, slack, step)

    count = min(values.shape[1], max(_SAMPLE, _TESTS // steps.numel()))
    some = torch.linspace(0, values.shape[1] - 1, count).long()
    open_ = fits(values[:, some, None], slack[:, some, None], steps[:, None, :]).all(dim=1)
    chosen = torch.zeros_like(steps[:, :1])
    left = torch.arange(len(values))
    for _ in range(_ROUNDS):
        if not bool(open_[left].any(dim=1).all()):
            return None
        first = open_[left].to(torch.uint8).argmax(dim=1)
        step = steps[left, first][:, None]
        good = fits(values[left], slack[left], step).all(dim=1)
        chosen[left[good]] = step[good]
        open_[left, first] = False
        left = left[~good]
        if not len(left):
            return chosen
    return None
