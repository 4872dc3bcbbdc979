"""Every type of result, and whatever hypothesis draws for one of them."""

import functools
import importlib
import pkgutil
import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin

from hypothesis import strategies as st

import preimage
from preimage.geometry.result import Geometry, LayerSet
from preimage.training import Trajectory

SIMPLE = {
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.none() | st.integers() | st.text(max_size=5),
}


def result_types() -> list[type]:
    """Every dataclass of a result module."""
    names = [module.name for module in pkgutil.walk_packages(preimage.__path__, "preimage.")]
    modules = [importlib.import_module(name) for name in names if name.endswith("result")]
    found = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and is_dataclass(value)
    ]
    return sorted(found, key=lambda value: value.__name__)


class Recipe(NamedTuple):
    """An object to be made outside of what hypothesis draws: the checks of its shapes use ``random``."""

    kind: Any
    values: dict[str, Any]


def of(kind: Any, least: int = 0) -> st.SearchStrategy[Any]:
    """Values of an annotated type, small ones; containers have ``least`` entries at least."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(of, args))
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(of, args))
    if origin in (tuple, Sequence):
        return st.lists(of(args[0]), min_size=least, max_size=2).map(tuple)
    if origin is list:
        return st.lists(of(args[0]), min_size=least, max_size=2)
    if origin is dict:
        return st.dictionaries(of(args[0]), of(args[1]), min_size=least, max_size=2)
    return recipes(kind)


@functools.cache
def recipes(kind: Any) -> st.SearchStrategy[Recipe]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else kind._fields
    values = st.fixed_dictionaries({name: of(hints[name], LEAST.get((kind, name), 0)) for name in names})
    return values.map(lambda values: Recipe(kind, values))


# What else a result writes of itself is about its last layer, and about the first and last checkpoint.
LEAST = {(Geometry, "layers"): 1, (Trajectory, "checkpoints"): 2}


def made(value: Any) -> Any:
    """The object of a recipe, and of every recipe in it."""
    if isinstance(value, Recipe):
        values = {name: made(part) for name, part in value.values.items()}
        if value.kind is Geometry:
            first, *others = values["layers"].values()
            values["layers"] = [replace(first, layer="final"), *others]
        elif value.kind is LayerSet:
            values["layers"] = list(values["layers"].values())
        if value.kind in (Geometry, LayerSet):  # every layer under its own number
            values["layers"] = {measured.layer: measured for measured in values["layers"]}
        return value.kind(**values)
    if isinstance(value, tuple):
        return tuple(map(made, value))
    if isinstance(value, dict):
        return {key: made(part) for key, part in value.items()}
    return value
