"""Results as json and back, by the types of their fields: no result writes a reader of its own."""

from __future__ import annotations

import math
import reprlib
import types
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from preimage.errors import RunFolderError, first_line
from preimage.storage.files import SCHEMA, read_json, write_json
from preimage.storage.places import Place, place_of

_PLAIN = (int, str, bool)


class Saved:
    """A frozen dataclass that can be written as one json document and read again, by its ``_kind``."""

    _kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # whoever inherits is a dataclass

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`, also after json made keys texts and null of what is not finite."""
        result: Self = decode(cls, data)
        return result

    def save(self, path: str | Path | Place) -> Place:
        """Write one json document."""
        return write_json(place_of(path), {"schema": SCHEMA, "kind": self._kind, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path | Place) -> Self:
        """The inverse of :meth:`save`."""
        document = read_json(place_of(path))
        try:
            for name, expected in (("kind", cls._kind), ("schema", SCHEMA)):
                if document.get(name) != expected:
                    raise ValueError(f"its {name} is {reprlib.repr(document.get(name))}, not {expected!r}")
            return cls.from_dict(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"it has no {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
            raise RunFolderError(
                f"{path} is not a saved {cls._kind}: {reason}.", "Give a file that .save(path) wrote."
            ) from error


def decode(kind: Any, value: Any) -> Any:
    """A value of an annotated type from what json kept of it; what cannot be one is a TypeError."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _decode_fields(kind, value)
    if origin in (Union, types.UnionType):
        return _decode_union(inner, value)
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            raise TypeError(f"{reprlib.repr(value)} is not a list")
        each = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(value)
        decoded = [decode(one, part) for one, part in zip(each, value, strict=True)]
        return decoded if origin is list else tuple(decoded)
    if origin is dict:
        return {_decode_key(inner[0], key): decode(inner[1], part) for key, part in value.items()}
    if kind is float and value is None:
        return math.nan
    wanted = (int, float) if kind is float else kind if kind in _PLAIN else object
    if not isinstance(value, wanted) or (origin is Literal and value not in inner):
        raise TypeError(f"{reprlib.repr(value)} is not of type {kind}")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode_fields(kind: Any, data: dict[str, Any]) -> Any:
    """A dataclass or named tuple; entries that are not among its fields were derived from them."""
    if is_dataclass(kind):
        optional = {field.name for field in fields(kind) if field.default is not MISSING}
        names = [field.name for field in fields(kind)]
    else:
        names, optional = kind._fields, set(kind._field_defaults)
    given = [name for name in names if name in data or name not in optional]
    return kind(**{name: decode(_hints(kind)[name], data[name]) for name in given})


def _decode_union(kinds: Sequence[Any], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        try:
            return decode(kind, value)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    raise TypeError(f"{reprlib.repr(value)} is none of {', '.join(map(str, kinds))}")


def _decode_key(kind: Any, key: Any) -> Any:
    """A dictionary's key, which json made a text."""
    numbers = kind is int or int in get_args(kind)
    return int(key) if numbers and isinstance(key, str) and key.lstrip("-").isdecimal() else key
