"""Branches that the followed passes did not take, and that prompts of other lengths would.

A pass shows what runs at its own length. The code that ran is read beside it: a call with a kink or a choice
that stands under a condition on a size, and did not run, leaves the question open.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator, Set
from types import CodeType

from preimage.theory.analyticity.operations import BREAKING

_SIZES = frozenset({"shape", "size", "numel", "len"})
_SPELLINGS = frozenset({"clip", "normalize", "softsign"})  # names of Python for operations of other names


def other_lengths(code: CodeType, ran: Set[int]) -> Iterator[str]:
    """Calls of breaking operations under a condition on a size, on lines that did not run, each once."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return
    sized = _sized_names(tree)
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and _is_sized(node.test, sized):
            for call in _calls(node):
                at = range(call.lineno + first - 1, (call.end_lineno or call.lineno) + first)
                if not any(line in ran for line in at):
                    names[_name(call)] = None
    yield from names


def _calls(node: ast.If | ast.IfExp | ast.While) -> Iterator[ast.Call]:
    """The breaking calls in the branches of a condition."""
    branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
    for branch in branches:
        for part in ast.walk(branch):
            if isinstance(part, ast.Call) and _name(part) in BREAKING | _SPELLINGS:
                yield part


def _name(call: ast.Call) -> str:
    """The last name of what is called, in place or not; nothing for Python's own, and for parts of self."""
    called = call.func
    if isinstance(called, ast.Attribute):
        own = isinstance(called.value, ast.Name) and called.value.id == "self"
        return "" if own else called.attr.removesuffix("_")
    return called.id if isinstance(called, ast.Name) and not hasattr(builtins, called.id) else ""


def _sized_names(tree: ast.AST) -> set[str]:
    """Variables that a size was put into, from one to the next."""
    sized: set[str] = set()
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for _ in range(len(assigned)):
        before = len(sized)
        for node in assigned:
            if _is_sized(node.value, sized):
                targets = (part for target in node.targets for part in ast.walk(target))
                sized |= {part.id for part in targets if isinstance(part, ast.Name)}
        if len(sized) == before:
            break
    return sized


def _is_sized(node: ast.expr, names: Set[str]) -> bool:
    """Whether an expression is itself made of sizes: what a call gives is not a size of what it is given."""
    if isinstance(node, ast.Attribute):
        return node.attr in _SIZES
    if isinstance(node, ast.Name):
        return node.id in names or node.id in _SIZES
    if isinstance(node, ast.Call):
        sizes = isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "int")
        return _is_sized(node.func, names) or (sizes and any(_is_sized(one, names) for one in node.args))
    return any(_is_sized(part, names) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
