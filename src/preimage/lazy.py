"""Packages whose names are loaded when first used, so that a quick command does not wait for torch."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's ``__getattr__``, ``__dir__`` and ``__all__``.

    The public names are those its ``__init__.py`` imports under ``if TYPE_CHECKING:``, written once for the
    type checker and for this. The modules they come from and the package's own packages can be reached too.
    """
    file = Path(str(sys.modules[package].__file__))
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    home_of = {alias.name: str(node.module) for node in imports for alias in node.names}
    modules = {home.removeprefix(f"{package}.").partition(".")[0] for home in home_of.values()}
    modules |= {part.parent.name for part in file.parent.glob("*/__init__.py")}

    def find(name: str) -> Any:
        if name in home_of:
            home = importlib.import_module(home_of[name])
            same = home.__name__ == f"{package}.{name}" and callable(
                home
            )  # a room that is called like a function
            return home if same else getattr(home, name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        there = vars(sys.modules[package]).items()
        own = {name for name, value in there if name.startswith("__") or isinstance(value, ModuleType)}
        return sorted(own | home_of.keys() | modules)

    return find, names, sorted(home_of)
