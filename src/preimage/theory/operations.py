"""The operations of torch: which are real-analytic, and where.

A rule is given the call and says which values the result may take, or what is not analytic about it. What has
no rule is not known: nothing is analytic because of its name alone, and these are torch's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from preimage.theory.ranges import (
    ANY,
    Range,
    added,
    closed,
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
        found: list[Tensor] = []
        for value in self.given.values():
            found += [one for one in (value if isinstance(value, list | tuple) else [value]) if _tensor(one)]
        return found


Rule: TypeAlias = Callable[[Call], Range | Break]


def judge(call: Call) -> Range | Break:
    """The values of what a call gives, or what is not analytic about it."""
    rule = _RULES.get(call.name)
    return Break(OTHER, None, f"{call.name} is an operation that is not known") if rule is None else rule(call)


def _tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _moved(call: Call) -> Range:
    """Entries are taken from the arguments, as they are; integers only say which."""
    found = call.tensors()
    values = [one for one in found if one.is_floating_point() or one.is_complex()]
    return union(map(call.range_of, values or found))


def _copied(call: Call) -> Range:
    return call.range("src")


def _moved_or(call: Call, *, name: str | None = None) -> Range | Break:
    """The same, with a number at some places: 0, or an argument."""
    if call.given.get("reduce") is not None:
        return Break(OTHER, None, f"{call.name} with reduce is not known")
    value = 0.0 if name is None else call.given.get(name)
    if value is None or isinstance(value, Tensor | str):
        value = 0.0
    return union([_moved(call), constant(float(value))])


def _put(call: Call) -> Range:
    found = union([call.range("self"), call.range("values")])
    return summed(union([found, constant(0.0)])) if call.given.get("accumulate") else found


def _where(call: Call) -> Range:
    return union([call.range("self"), call.range("other")])


def _converted(call: Call) -> Range | Break:
    kind = call.given.get("dtype")
    if isinstance(kind, torch.dtype) and (
        kind.itemsize < 2 or not (kind.is_floating_point or kind.is_complex)
    ):
        return Break(QUANTISED, False, f"a conversion to {kind}: a step function")
    if kind is not None and call.name == "view":
        return Break(OTHER, None, "the bits of a number are read as another type")
    return call.range("self")


def _summed(call: Call) -> Range:
    return summed(_moved(call))


def _averaged(call: Call) -> Range:
    return call.range("self")


def _anything(_: Call) -> Range:
    return ANY


def _spread(_: Call) -> Range:
    return Range(0.0, math.inf, True, False)


def _scaled(call: Call, name: str) -> Range:
    factor = call.given.get("alpha")
    return multiplied(constant(1.0 if factor is None else float(factor)), call.range(name))


def _sum(call: Call) -> Range:
    return added(call.range("self"), _scaled(call, "other"))


def _difference(call: Call) -> Range:
    return added(call.range("self"), negated(_scaled(call, "other")))


def _reversed_difference(call: Call) -> Range:
    return added(call.range("other"), negated(_scaled(call, "self")))


def _product(call: Call) -> Range | Break:
    one, other = call.given["self"], call.given["other"]
    if _same(one, other):
        return squared(call.range("self"))
    first, second = call.range("self"), call.range("other")
    if (first.has_infinity and not _one_sign(second)) or (second.has_infinity and not _one_sign(first)):
        return Break(DOMAIN, None, f"{call.name} by what may be infinite")
    return multiplied(first, second)


def _one_sign(found: Range) -> bool:
    return found.positive or negated(found).positive


def _same(one: Any, other: Any) -> bool:
    """Whether two tensors are the same entries in the same order."""
    if one is other:
        return True
    if not (_tensor(one) and _tensor(other)) or one.layout != torch.strided or other.layout != torch.strided:
        return False
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return places[0] == places[1] and one.numel() > 0 and not one.is_meta


def _quotient(call: Call) -> Range | Break:
    if call.given.get("rounding_mode") is not None:
        return Break(QUANTISED, False, f"{call.name} with rounding: a step function")
    above, below = call.range("self"), call.range("other")
    if below.has_zero:
        return Break(DOMAIN, False, f"{call.name} by what may be 0")
    return multiplied(above, inverted(below))


def _inverse(call: Call) -> Range | Break:
    found = call.range("self")
    return Break(DOMAIN, False, f"{call.name} of what may be 0") if found.has_zero else inverted(found)


def _root(call: Call, *, inverse: bool) -> Range | Break:
    found = call.range("self")
    if not found.positive:
        return Break(DOMAIN, False, f"{call.name} of what may be 0: eps = 0, or none")
    root = rising(math.sqrt, found)
    return inverted(root) if inverse else root


def _logarithm(call: Call, *, shift: float = 0.0) -> Range | Break:
    found = added(call.range("self"), constant(shift))
    if not found.positive:
        return Break(DOMAIN, False, f"{call.name} of what may be 0")
    return rising(lambda value: math.log(value) if value else -math.inf, found)


def _power(call: Call) -> Range | Break:
    exponent = call.given["exponent"]
    base = call.range("self")
    if isinstance(exponent, int | float) and float(exponent).is_integer():
        if exponent < 0 and base.has_zero:
            return Break(DOMAIN, False, f"a power of {exponent} of what may be 0")
        if exponent == 0:
            return constant(1.0)
        if exponent in (1, 2):
            return base if exponent == 1 else squared(base)
        even = Range(0.0, math.inf, base.has_zero, False)
        return even if exponent % 2 == 0 or base.positive else ANY
    if not base.positive:
        return Break(DOMAIN, False, f"a power of {exponent if not _tensor(exponent) else 'x'} of what may be 0")
    return Range(0.0, math.inf, False, False)


def _normed(call: Call) -> Range | Break:
    eps = call.given.get("eps")
    if eps is None or float(eps) > 0:
        return ANY
    return Break(DOMAIN, False, f"{call.name} with eps = {eps:g}: not analytic where its input has no spread")


def _piecewise(call: Call, *, at: float = 0.0, reason: str = "a kink at 0") -> Range | Break:
    """Two pieces that meet at one point: analytic where the argument stays on one side of it."""
    found = call.range("self")
    if found.low >= at or found.high <= at:
        return ANY if call.name not in ("abs", "relu") else _one_side(call.name, found)
    return Break(ACTIVATION, False, f"{call.name}: {reason}")


def _one_side(name: str, found: Range) -> Range:
    if found.low >= 0:
        return found
    return negated(found) if name == "abs" else constant(0.0)


def _clipped(call: Call) -> Range | Break:
    found = call.range("self")
    for name in ("min", "max"):
        limit = call.given.get(name)
        if limit is None:
            continue
        ends = call.range_of(limit)
        if not (ends.high <= found.low if name == "min" else ends.low >= found.high):
            low, high = (call.range_of(call.given.get(end)) for end in ("min", "max"))
            inside = Range(max(low.low, found.low), min(high.high, found.high), True, True)
            return Break(CLIPPING, False, f"{call.name}: constant outside a range", inside)
    return found


def _larger(call: Call) -> Range | Break:
    one, other = call.range("self"), call.range("other")
    if one.low >= other.high or other.low >= one.high:
        return union([one, other])
    return Break(ACTIVATION, False, f"{call.name}: a kink where both are equal")


def _chosen(call: Call) -> Range | Break:
    k, entries, dim = call.given.get("k"), call.given["self"], call.given.get("dim")
    values = call.range("self")
    if k is not None and entries.ndim and k >= entries.shape[-1 if dim is None else dim]:
        return Break(ROUTING, None, f"{call.name} takes every entry, in an order that jumps", values)
    return Break(ROUTING, False, f"{call.name}: which entries are taken jumps", values)


def _broken(call: Call, *, kind: str, analytic: bool | None, reason: str) -> Break:
    return Break(kind, analytic, f"{call.name}: {reason}", stepped=reason in (_JUMP, _STEP))


def _solved(call: Call) -> Range | Break:
    if call.given.get("unitriangular"):
        return ANY  # sums of products: the diagonal is 1
    return Break(DOMAIN, None, f"{call.name} with a diagonal that may be 0")


def _function(call: Call, *, values: Callable[[Range], Range]) -> Range:
    return values(call.range("self"))


def _sigmoid(value: float) -> float:
    return 0.0 if value < -700 else 1 / (1 + math.exp(-value))


def _above_zero(found: Range) -> Range:
    """Exponentials: 0 itself only where a mask is infinite."""
    return Range(0.0, math.inf, found.low_met and math.isinf(found.low), False)


_JUMP, _STEP = "a jump", "a step function"
_BOUNDED = closed(-1.0, 1.0)
_VALUES: dict[str, Callable[[Range], Range]] = {
    "exp": partial(rising, math.exp),
    "sigmoid": partial(rising, _sigmoid),
    "tanh": partial(rising, math.tanh),
    "erf": partial(rising, math.erf),
    "atan": partial(rising, math.atan),
    "softplus": _above_zero,
    "neg": negated,
    "square": squared,
    "sin": lambda _: _BOUNDED,
    "cos": lambda _: _BOUNDED,
    "_softmax": lambda found: Range(0.0, 1.0, found.has_infinity, True),
    "_safe_softmax": lambda found: Range(0.0, 1.0, found.has_infinity, True),
    "cosh": lambda _: Range(1.0, math.inf, True, False),
    "exp2": _above_zero,
}
_NAMES: list[tuple[Rule, str]] = [
    (
        _moved,
        "alias as_strided cat chunk clone contiguous detach diagonal embedding expand flatten flip gather "
        "index index_copy index_select lift lift_fresh movedim narrow permute pixel_shuffle "
        "repeat repeat_interleave reshape _reshape_alias resolve_conj roll select select_scatter slice "
        "slice_scatter split split_with_sizes squeeze stack swapaxes t take_along_dim tile transpose "
        "unbind unflatten unfold unsafe_chunk unsafe_split _unsafe_view unsqueeze masked_scatter "
        "real view_as_real",
    ),
    (_copied, "copy"),
    (_converted, "_to_copy to view"),
    (_moved_or, "tril triu diag_embed zero"),
    (partial(_moved_or, name="value"), "masked_fill constant_pad_nd fill index_fill scatter"),
    (_put, "index_put _unsafe_index_put"),
    (_where, "where"),
    (_summed, "sum cumsum index_add scatter_add"),
    (_averaged, "mean avg_pool1d avg_pool2d"),
    (
        _anything,
        "mm bmm addmm baddbmm mv addmv dot vdot matmul linear addr addbmm convolution _convolution _grouped_mm "
        "_fft_r2c _fft_c2r _fft_c2c view_as_complex complex _conj imag polar prod cumprod addcmul lerp "
        "silu gelu mish glu log_sigmoid_forward _log_softmax logsumexp logcumsumexp expm1 sinh asinh erfc "
        "logaddexp trace "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps "
        "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward "
        "_efficient_attention_forward _cudnn_attention_forward",
    ),
    (_spread, "var"),
    (_sum, "add"),
    (_difference, "sub"),
    (_reversed_difference, "rsub"),
    (_product, "mul"),
    (_quotient, "div true_divide"),
    (_inverse, "reciprocal"),
    (partial(_root, inverse=False), "sqrt"),
    (partial(_root, inverse=True), "rsqrt"),
    (_logarithm, "log log2 log10"),
    (partial(_logarithm, shift=1.0), "log1p"),
    (_power, "pow"),
    (_solved, "linalg_solve_triangular"),
    (_normed, "native_layer_norm native_group_norm _fused_rms_norm"),
    (_piecewise, "abs relu leaky_relu _prelu_kernel rrelu_with_noise"),
    (partial(_piecewise, reason="two branches that meet at 0 with other derivatives"), "elu celu selu"),
    (_clipped, "clamp clamp_min clamp_max"),
    (_larger, "maximum minimum fmax fmin"),
    (_chosen, "topk sort argsort argmax argmin kthvalue median mode cummax cummin unique_dim _unique2 msort"),
]
_STEPS: list[tuple[str, bool | None, str, str]] = [
    (ACTIVATION, False, "pieces that meet with a kink", "hardtanh hardswish hardsigmoid hardshrink softshrink"),
    (ACTIVATION, False, "pieces that meet with a kink", "threshold softsign relu6"),
    (ACTIVATION, False, "a kink where two entries are equal", "max min amax amin aminmax"),
    (ACTIVATION, False, "a kink where two entries are equal", "max_pool2d_with_indices _adaptive_max_pool2d"),
    (ACTIVATION, False, _JUMP, "eq ne lt le gt ge sign sgn signbit heaviside logical_not logical_and"),
    (ACTIVATION, False, _JUMP, "logical_or logical_xor any all nonzero count_nonzero bucketize searchsorted"),
    (DOMAIN, False, "a root of what may be 0", "linalg_vector_norm norm std std_mean linalg_norm"),
    (CLIPPING, False, "rows longer than max_norm are rescaled", "embedding_renorm"),
    (QUANTISED, False, _STEP, "round floor ceil trunc floor_divide"),
    (QUANTISED, False, _STEP, "fake_quantize_per_tensor_affine_cachemask quantize_per_tensor"),
    (QUANTISED, False, _STEP, "fake_quantize_per_channel_affine_cachemask quantize_per_channel"),
    (QUANTISED, False, "jumps at whole numbers", "frac remainder fmod"),
    (OTHER, None, "asks whether a number overflowed", "isnan isinf nan_to_num isposinf isneginf"),
]
_RULES: dict[str, Rule] = {
    **{name: rule for rule, names in _NAMES for name in names.split()},
    **{name: partial(_function, values=values) for name, values in _VALUES.items()},
    **{
        name: partial(_broken, kind=kind, analytic=analytic, reason=reason)
        for kind, analytic, reason, names in _STEPS
        for name in names.split()
    },
}
FRESH = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor".split())
UNWRITTEN = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_quantized".split()
)


def is_random(tags: Iterable[torch.Tag], given: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; of a dropout, whether it is on."""
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    off = [given.get("dropout_p", 1) == 0, given.get("p", 1) == 0]
    return not (any(off) or given.get("train") is False or given.get("training") is False)
