"""What a module's own forward calls, read from its source: operations with a kink, a cut or a choice.

The methods it calls on itself and the functions of its own file are read too. A call under an ``if`` whose
condition only asks for the module's attributes is decided by them; under any other it may run, or not.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

ACTIVATION, CLIPPING, ROUTING, QUANTISED = "activation", "clipping", "routing", "quantised"

_CALLS = {
    ACTIVATION: "relu relu_ relu6 leaky_relu prelu rrelu elu selu celu hardtanh hardswish hardsigmoid "
    "hardshrink softshrink softsign threshold abs sign maximum minimum",
    CLIPPING: "clamp clamp_ clamp_min clamp_max clamp_min_ clamp_max_ clip clip_",
    ROUTING: "topk argmax argsort sort",
    QUANTISED: "round round_ floor ceil fake_quantize_per_tensor_affine quantize_per_tensor",
}
BREAKING = {name: kind for kind, names in _CALLS.items() for name in names.split()}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}


class Call(NamedTuple):
    """A call that breaks analyticity; ``runs`` is False where it stands under a condition left open."""

    name: str
    kind: str
    runs: bool


def breaking_calls(module: nn.Module) -> list[Call] | None:
    """Every such call that the module's forward may make, each once; None where there is no source."""
    forward = inspect.unwrap(type(module).forward)
    tree = _parsed(forward)
    if tree is None:
        return None
    found: dict[str, Call] = {}
    for call in _walk(tree, module, forward, True, {forward}):
        if call.name not in found or call.runs:
            found[call.name] = call
    return list(found.values())


def constant_argument(module: nn.Module, name: str) -> Any:
    """The number that a module's forward passes on as the argument ``name``; None where it passes none."""
    tree = _parsed(inspect.unwrap(type(module).forward))
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == name and isinstance(node.value, ast.Constant):
            return node.value.value
    return None


def _walk(
    node: ast.AST, module: nn.Module, function: Callable[..., Any], runs: bool, seen: set[Any]
) -> Iterator[Call]:
    """The calls below a node, in branches that the module's attributes do not exclude."""
    if isinstance(node, ast.If | ast.IfExp):
        known = _value(node.test, module)
        yield from _walk(node.test, module, function, runs, seen)
        for branch, taken in ((node.body, True), (node.orelse, False)):
            if known is not _OPEN and bool(known) is not taken:
                continue
            for part in branch if isinstance(branch, list) else [branch]:
                yield from _walk(part, module, function, runs and known is not _OPEN, seen)
        return
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if name in BREAKING:
            yield Call(name, BREAKING[name], runs)
        called = _own(node.func, module, function)
        if called is not None and called not in seen:
            seen.add(called)
            tree = _parsed(called)
            if tree is not None:
                yield from _walk(tree, module, called, runs, seen)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, module, function, runs, seen)


def _name(called: ast.expr) -> str:
    """The last name of what is called; nothing for plain numbers, which no parameter enters."""
    if isinstance(called, ast.Attribute):
        plain = isinstance(called.value, ast.Name) and called.value.id in ("math", "np", "numpy")
        return "" if plain else called.attr
    return called.id if isinstance(called, ast.Name) else ""


def _own(called: ast.expr, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The method of this module, or the function of this file, that is called."""
    found: Any = None
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
        found = getattr(type(module), called.attr, None)
    elif isinstance(called, ast.Name):
        found = getattr(function, "__globals__", {}).get(called.id)
        if getattr(found, "__module__", None) != function.__module__:
            return None
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, FunctionType) else None


def _parsed(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


_OPEN = object()  # a condition that attributes do not decide


def _value(node: ast.expr, module: nn.Module) -> Any:
    """What an expression over constants and attributes of ``self`` is; open for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return module if node.id == "self" else _OPEN
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, module)
        return _OPEN if owner is _OPEN else getattr(owner, node.attr, _OPEN)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, module)
        return _OPEN if value is _OPEN else not value
    if isinstance(node, ast.BoolOp):
        values = [_value(part, module) for part in node.values]
        decides = isinstance(node.op, ast.Or)  # one true part decides an or, one false part an and
        if any(value is not _OPEN and bool(value) is decides for value in values):
            return decides
        return _OPEN if _OPEN in values else not decides
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        left, right = _value(node.left, module), _value(node.comparators[0], module)
        return _OPEN if _OPEN in (left, right) else _COMPARED[type(node.ops[0])](left, right)
    return _OPEN
