"""The operations of torch, and the rule for each: which are real-analytic, and where.

What has no rule is not known. Names are those of torch's own kernels, not of anybody's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from preimage.theory.analyticity import rules
from preimage.theory.analyticity.ranges import ANY, Range, closed, negated, rising, squared, union
from preimage.theory.analyticity.rules import ACTIVATION, CLIPPING, DOMAIN, JUMP, OTHER, QUANTISED, STEP


def judge(call: rules.Call) -> Range | rules.Break:
    """The values of what a call gives, or what is not analytic about it."""
    if call.name not in _RULES:
        return rules.Break(OTHER, None, f"{call.name} is an operation that is not known")
    return _RULES[call.name](call)


def names_in(text: str) -> frozenset[str]:
    """Names with spaces between them, as a set."""
    return frozenset(text.split())


_BOUNDED = closed(-1.0, 1.0)
_VALUES: dict[str, Callable[[Range], Range]] = {
    "exp": partial(rising, math.exp),
    "sigmoid": partial(rising, rules.logistic),
    "tanh": partial(rising, math.tanh),
    "erf": partial(rising, math.erf),
    "atan": partial(rising, math.atan),
    "softplus": rules.above_zero,
    "neg": negated,
    "square": squared,
    "sin": lambda _: _BOUNDED,
    "cos": lambda _: _BOUNDED,
    "_softmax": lambda values: Range(0.0, 1.0, values.has_infinity, True),
    "_safe_softmax": lambda values: Range(0.0, 1.0, values.has_infinity, True),
    "cosh": lambda _: Range(1.0, math.inf, True, False),
    "exp2": rules.above_zero,
}
_NAMES: list[tuple[rules.Rule, str]] = [
    (
        rules.moved,
        "alias as_strided cat chunk clone contiguous detach diagonal embedding expand flatten flip gather "
        "index index_copy index_select lift lift_fresh movedim narrow permute pixel_shuffle "
        "repeat repeat_interleave reshape _reshape_alias resolve_conj roll select select_scatter slice "
        "slice_scatter split split_with_sizes squeeze stack swapaxes t take_along_dim tile transpose "
        "unbind unflatten unfold unsafe_chunk unsafe_split _unsafe_view unsqueeze masked_scatter "
        "real view_as_real",
    ),
    (lambda call: call.range("src"), "copy"),
    (rules.converted, "_to_copy to view"),
    (rules.moved_or, "tril triu diag_embed zero"),
    (partial(rules.moved_or, name="value"), "masked_fill constant_pad_nd fill index_fill scatter"),
    (rules.put, "index_put _unsafe_index_put"),
    (lambda call: union([call.range("self"), call.range("other")]), "where"),
    (rules.total, "sum cumsum index_add scatter_add"),
    (lambda call: call.range("self"), "mean avg_pool1d avg_pool2d"),  # a mean lies where the entries do
    (
        lambda _: ANY,
        "mm bmm addmm baddbmm mv addmv dot vdot matmul linear addr addbmm convolution _convolution "
        "_grouped_mm _fft_r2c _fft_c2r _fft_c2c view_as_complex complex _conj imag polar prod cumprod "
        "addcmul lerp silu gelu mish glu log_sigmoid_forward _log_softmax logsumexp logcumsumexp expm1 "
        "sinh asinh erfc logaddexp trace "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps "
        "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward "
        "_efficient_attention_forward _cudnn_attention_forward",
    ),
    (lambda _: Range(0.0, math.inf, True, False), "var"),
    (rules.added_up, "add"),
    (partial(rules.added_up, sign=-1.0), "sub"),
    (partial(rules.added_up, x="other", y="self", sign=-1.0), "rsub"),
    (rules.product, "mul"),
    (rules.quotient, "div true_divide"),
    (rules.inverse, "reciprocal"),
    (partial(rules.root, inverse=False), "sqrt"),
    (partial(rules.root, inverse=True), "rsqrt"),
    (rules.logarithm, "log log2 log10"),
    (partial(rules.logarithm, shift=1.0), "log1p"),
    (rules.power, "pow"),
    (rules.solved, "linalg_solve_triangular"),
    (rules.normed, "native_layer_norm native_group_norm _fused_rms_norm"),
    (rules.piecewise, "abs relu leaky_relu _prelu_kernel rrelu_with_noise"),
    (partial(rules.piecewise, reason="two branches that meet at 0 with other derivatives"), "elu celu selu"),
    (rules.clipped, "clamp clamp_min clamp_max"),
    (rules.larger, "maximum minimum fmax fmin"),
    (
        rules.chosen,
        "topk sort argsort argmax argmin kthvalue median mode cummax cummin unique_dim _unique2 msort",
    ),
]
_STEPS: list[tuple[str, bool | None, str, str]] = [
    (ACTIVATION, False, "pieces that meet with a kink", "hardtanh hardswish hardsigmoid hardshrink relu6"),
    (ACTIVATION, False, "pieces that meet with a kink", "threshold softsign softshrink"),
    (ACTIVATION, False, "a kink where two entries are equal", "max min amax amin aminmax"),
    (ACTIVATION, False, "a kink where two entries are equal", "max_pool2d_with_indices _adaptive_max_pool2d"),
    (ACTIVATION, False, JUMP, "eq ne lt le gt ge sign sgn signbit heaviside logical_not logical_and"),
    (ACTIVATION, False, JUMP, "logical_or logical_xor any all nonzero count_nonzero bucketize searchsorted"),
    (DOMAIN, False, "a root of what may be 0", "linalg_vector_norm norm std std_mean linalg_norm"),
    (CLIPPING, False, "rows longer than max_norm are rescaled", "embedding_renorm"),
    (QUANTISED, False, STEP, "round floor ceil trunc floor_divide"),
    (QUANTISED, False, STEP, "fake_quantize_per_tensor_affine_cachemask quantize_per_tensor"),
    (QUANTISED, False, STEP, "fake_quantize_per_channel_affine_cachemask quantize_per_channel"),
    (QUANTISED, False, "jumps at whole numbers", "frac remainder fmod"),
    (OTHER, None, "asks whether a number overflowed", "isnan isinf nan_to_num isposinf isneginf"),
]
_RULES: dict[str, rules.Rule] = {
    **{name: rule for rule, names in _NAMES for name in names.split()},
    **{name: partial(rules.function, values=values) for name, values in _VALUES.items()},
    **{
        name: partial(rules.broken, kind=kind, analytic=analytic, reason=reason)
        for kind, analytic, reason, names in _STEPS
        for name in names.split()
    },
}
_PIECES = (rules.clipped, rules.larger, rules.chosen)
BREAKING = frozenset(  # names that are worth looking for in code that did not run
    [name for _, _, _, names in _STEPS for name in names.split() if len(name) > 2]
    + [name for rule, names in _NAMES if rule in _PIECES for name in names.split()]
    + ["abs", "relu", "leaky_relu", "prelu", "elu", "selu", "celu"]
)
FRESH = names_in("zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor")
UNWRITTEN = names_in(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_quantized"
)


def is_random(tags: Iterable[torch.Tag], given: dict[str, Any]) -> bool:
    """Whether a call draws random numbers; of a dropout, whether it is on."""
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    off = 0 in (given.get("dropout_p", 1), given.get("p", 1))
    return not (off or given.get("train") is False or given.get("training") is False)
