"""Packages whose names are loaded when first used, so that a quick command does not wait for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's ``__getattr__`` and ``__dir__``: each public name and its home, relative to ``package``."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    def names() -> list[str]:
        there = vars(sys.modules[package]).items()
        own = {name for name, value in there if name.startswith("__") or isinstance(value, ModuleType)}
        return sorted(own | homes.keys())

    return find, names
