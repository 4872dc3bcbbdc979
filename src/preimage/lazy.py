"""Packages whose names are loaded when first used, so that a quick command does not wait for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's ``__getattr__``, ``__dir__`` and ``__all__``.

    ``homes``: the modules of the package, by their names relative to it, and the public names each holds,
    with spaces between them.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name in homes:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    def names() -> list[str]:
        there = vars(sys.modules[package]).items()
        own = {name for name, value in there if name.startswith("__") or isinstance(value, ModuleType)}
        return sorted(own | home_of.keys() | {home for home in homes if "." not in home})

    return find, names, sorted(home_of)
