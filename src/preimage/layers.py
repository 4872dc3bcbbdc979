"""Layer numbers, in one convention everywhere.

0 is what enters block 1 (embedding, scaling and absolute positions included), k = 1..L is the raw output of
block k, and "final" is what leaves the last norm. (``hidden_states[-1]`` of transformers is "final", not L.)
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Literal, TypeAlias

from preimage.errors import LayerError, clip

Layer: TypeAlias = int | Literal["final"]
LayerSpec: TypeAlias = int | str | Iterable[int | str]

CONVENTION = '0 = input of block 1; k = raw output of block k; "final" = after the last norm'


def parse_layers(spec: LayerSpec, n_layers: int) -> tuple[Layer, ...]:
    """Every layer a specification names, in ascending order and once each.

    A specification is a layer, a list of layers, or text such as ``"15"``, ``"1,8,final"``, ``"0-4"`` or
    ``"all"`` (0..L and "final").
    """
    parts: list[int | str]
    if isinstance(spec, str):
        parts = [part.strip() for part in spec.split(",")]
    else:
        try:
            parts = list(spec)  # type: ignore[arg-type]  # one layer, or what is none, cannot be listed
        except TypeError:
            parts = [spec]  # type: ignore[list-item]  # the same
    if not parts:
        raise LayerError("No layer was given.", _allowed(n_layers))
    found: set[Layer] = set()
    for part in parts:
        found.update(_parse_one(part, n_layers))
    numbers = sorted(layer for layer in found if layer != "final")
    return (*numbers, "final") if "final" in found else tuple(numbers)


def all_layers(n_layers: int) -> tuple[Layer, ...]:
    """0..L and "final"."""
    return (*range(n_layers + 1), "final")


def parse_layer(spec: int | str, n_layers: int) -> Layer:
    """The one layer a specification names."""
    layers = parse_layers(spec, n_layers)
    if len(layers) != 1:
        raise LayerError(
            f"One layer is needed here, {clip(repr(spec))} names {len(layers)}.", _allowed(n_layers)
        )
    return layers[0]


def _parse_one(part: int | str, n_layers: int) -> list[Layer]:
    if not isinstance(part, str):
        return [_number(part, part, n_layers)]
    if part == "final":
        return ["final"]
    if part == "all":
        return list(all_layers(n_layers))
    if part.count("-") == 1 and not part.startswith("-"):
        low, high = (_number(end, part, n_layers) for end in part.split("-"))
        if low > high:
            raise LayerError(f"Layer range {clip(repr(part))} runs backwards.", _allowed(n_layers))
        return list(range(low, high + 1))
    return [_number(part, part, n_layers)]


def _number(text: int | str, given: int | str, n_layers: int) -> int:
    text = text.strip() if isinstance(text, str) else text  # of more than int() itself strips
    is_number = _is_decimal(text) if isinstance(text, str) else _is_whole(text)
    if not is_number or not 0 <= int(text) <= n_layers:
        raise LayerError(f"There is no layer {clip(repr(given))}.", _allowed(n_layers))
    return int(text)


def _is_decimal(text: str) -> bool:
    return text.isdecimal() and len(text) < 100  # Python reads no number of thousands of digits


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers too


def _allowed(n_layers: int) -> str:
    return f'This model has layers 0..{n_layers} and "final".'
