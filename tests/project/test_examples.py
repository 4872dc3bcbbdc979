"""The examples in docstrings run as they are written."""

import doctest
import importlib
import pkgutil

import pytest

import preimage

NAMES = [module.name for module in pkgutil.walk_packages(preimage.__path__, "preimage.")]
MODULES = [name for name in NAMES if not name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
