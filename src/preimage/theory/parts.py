"""What one module of a model is, and whether it is real-analytic in its parameters.

Modules of torch and transformers are recognised by their class name, their attributes and the source of their
forward. Anything else is reported as not known: a name alone proves nothing about other people's code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from preimage.theory.forward_code import (
    ACTIVATION,
    CLIPPING,
    QUANTISED,
    ROUTING,
    breaking_calls,
    constant_argument,
)

NORM, DROPOUT, OTHER = "norm", "dropout", "other"
_TRUSTED = ("torch", "transformers")
_SMOOTH = (
    "gelu newgelu gelunew gelutanh pytorchgelutanh fastgelu gelufast quickgelu accurategelu bloomgelu silu "
    "swish tanh sigmoid logsigmoid mish softplus sqrtsoftplus softmax exp erf linear laplace"
)
_ANALYTIC = frozenset(_SMOOTH.split())
_KINKED = {
    "relu relu6 leakyrelu prelu rrelu relusquared": "a kink at 0",
    "elu selu celu xielu": "two branches that meet at 0 with different derivatives of some order",
    "hardswish hardsigmoid hardtanh hardshrink softshrink threshold softsign": "pieces that meet with a kink",
}
_BROKEN = {name: reason for names, reason in _KINKED.items() for name in names.split()}
_CONTAINERS = ("ModuleList", "ModuleDict", "Sequential", "ParameterList", "Identity")
_QUANTISERS = re.compile(
    r"[48]bit|quant|awq|wqlinear|gptq|hqq|fp8|float8|mxfp4|bitlinear|aqlm|eetq|spqr|vptq|higgs", re.IGNORECASE
)
_GRIDS = re.compile(r"bitsandbytes|torchao|hqq|quant", re.IGNORECASE)  # where such tensors come from
_ACTS = re.compile(r"(^|_)act(ivation)?(_|$)")
_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_CHOSEN = ("top_k", "num_experts_per_tok", "topk")


@dataclass(frozen=True)
class Part:
    """One thing that was recognised in a module; ``analytic`` is None where it is not known."""

    kind: str
    analytic: bool | None
    reason: str


def parts(module: nn.Module, name: str = "") -> list[Part]:
    """What a module is, and everything about it that breaks analyticity or leaves it open.

    ``name`` is what its owner calls it: an unknown class that stands for an activation is one.
    """
    main = _quantised(module) or _main(module)
    if main.kind == OTHER and _ACTS.search(name):
        main = Part(ACTIVATION, main.analytic, main.reason)
    return list(dict.fromkeys([main, *_random(module), *_callables(module)]))


def _main(module: nn.Module) -> Part:
    name, lineage = type(module).__name__, {kind.__name__ for kind in type(module).__mro__}
    if not _trusted(module):
        calls = breaking_calls(module) or []
        for call in calls:
            if call.runs:
                return _broken_by(call.name, call.kind)
        return Part(OTHER, None, "code of neither torch nor transformers")
    if lineage & {"Linear", "Conv1D", "Conv1d"}:
        return Part("linear", True, "bilinear in input and parameters")
    function = _function(name)
    if function is not None:
        return function
    if "_DropoutNd" in lineage:
        return Part(DROPOUT, True, "the identity in eval mode, or at p = 0")
    if name in _CONTAINERS:
        return Part("container", True, "passes on to its parts")
    if "Embedding" in lineage:
        renormalises = getattr(module, "max_norm", None) is not None
        reason = "rows are rescaled to max_norm" if renormalises else "linear in its rows"
        return Part(CLIPPING if renormalises else "embedding", not renormalises, reason)
    if "norm" in name.lower():
        return _norm(module)
    return _by_code(module)


def _by_code(module: nn.Module) -> Part:
    """A module that is judged by what its forward calls."""
    name, calls = type(module).__name__, breaking_calls(module)
    if calls is None:
        return Part(OTHER, None, "the source of its forward cannot be read")
    routes = False
    for call in calls:
        if call.kind == ROUTING and _takes_every_expert(module):
            routes = True
            continue
        if call.runs:
            return _broken_by(call.name, call.kind)
        return Part(call.kind, None, f"its forward calls {call.name} under a condition that was left open")
    if routes:
        return Part(ROUTING, True, "every expert is used: nothing is chosen")
    if "rotary" in name.lower():
        return Part("rotary", True, "rotations that hold no parameters")
    if "attention" in name.lower():
        capped = getattr(module, "attn_logit_softcapping", None)
        return Part("attention", True, "softmax" + (f", scores capped by tanh at {capped}" if capped else ""))
    if not list(module.children()):
        return Part(OTHER, None, "a class that is not known")
    return Part("composition", True, "sums and products of its parts")


def _broken_by(call: str, kind: str) -> Part:
    words = {
        ACTIVATION: f"its forward calls {call}, which has a kink",
        CLIPPING: f"its forward calls {call}: constant outside a range",
        ROUTING: f"its forward calls {call}: which experts are used jumps",
        QUANTISED: f"its forward calls {call}: a step function",
    }
    return Part(kind, False, words[kind])


def _norm(module: nn.Module) -> Part:
    """Norms divide by sqrt(something + eps): analytic as long as eps > 0."""
    for call in breaking_calls(module) or []:
        if call.runs and not type(module).__module__.startswith("torch."):
            return _broken_by(call.name, call.kind)
    given = [name for name in _EPSILONS if hasattr(module, name)]
    eps = getattr(module, given[0]) if given else constant_argument(module, "eps")
    if eps is None:
        return Part(NORM, True if given else None, "the type's own eps" if given else "its eps was not found")
    if isinstance(eps, Tensor):
        eps = eps.item()
    reason = f"eps = {eps:g}" if eps > 0 else f"eps = {eps:g}: not analytic where its input has no spread"
    return Part(NORM, eps > 0, reason)


def _quantised(module: nn.Module) -> Part | None:
    """Weights on a grid, recognised by the module's class or by its parameters' type."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules") and _QUANTISERS.search(kind.__name__):
        return Part(QUANTISED, False, f"{kind.__name__}: weights on a grid have no density")
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in own:
        if _GRIDS.search(type(tensor).__module__):
            return Part(QUANTISED, False, f"{name} is a {type(tensor).__name__}: a grid has no density")
        narrow = tensor.dtype.itemsize < 2 and tensor.dtype != torch.bool
        if narrow and isinstance(tensor, nn.Parameter):
            return Part(QUANTISED, False, f"{name} is {tensor.dtype}: a grid has no density")
    return None


def _random(module: nn.Module) -> Iterator[Part]:
    """Dropout and jitter, which only act while a module trains."""
    if not module.training:
        return
    for name, value in vars(module).items():
        is_dropout = name == "p" and "Dropout" in type(module).__name__
        random = is_dropout or "dropout" in name or name in ("layerdrop", "jitter_noise")
        if random and isinstance(value, float) and value > 0:
            yield Part(DROPOUT, False, f"{name} = {value:g} in training mode: every pass is another map")


def _callables(module: nn.Module) -> Iterator[Part]:
    """Activations kept as plain functions instead of modules."""
    if _function(type(module).__name__) is not None and _trusted(module):
        return  # the function inside a known activation
    for name, value in vars(module).items():
        if _ACTS.search(name) and callable(value) and not isinstance(value, nn.Module | type):
            function: Callable[..., Any] = value.func if isinstance(value, functools.partial) else value
            called = getattr(function, "__name__", type(function).__name__)
            yield _function(called) or Part(ACTIVATION, None, f"{name} is {called}, which is not known")


def _function(name: str) -> Part | None:
    """An activation, by the name of its class or function."""
    key = name.lower().removesuffix("activation").replace("_", "")
    if key in _ANALYTIC:
        return Part(ACTIVATION, True, f"{name} is analytic")
    if key in _BROKEN:
        return Part(ACTIVATION, False, f"{name}: {_BROKEN[key]}")
    return Part(CLIPPING, False, f"{name}: constant outside a range") if key == "clippedgelu" else None


def _takes_every_expert(module: nn.Module) -> bool:
    owners = (module, getattr(module, "config", None))
    sizes = [
        next((getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)), None)
        for names in (_CHOSEN, _EXPERTS)
    ]
    chosen, experts = sizes
    return isinstance(chosen, int) and isinstance(experts, int) and chosen >= experts


def _trusted(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] in _TRUSTED
