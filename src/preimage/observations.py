"""What was seen of a prompt's states: where in the model, and what became of it since.

The raw residual stream, all of it, is what the library captures by itself. What people hold is often another
thing: keys or values of a cache, a copy in a few bits, one vector for a whole prompt, coordinates in another
order. An :class:`Observation` says which; candidates are seen the same way before they are compared.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from preimage.errors import OptionError
from preimage.layers import Layer, LayerSpec, parse_layer, parse_layers

Place: TypeAlias = Literal["residual", "final", "keys", "values", "kv", "attention", "mlp"]
Stored: TypeAlias = Literal["float32", "bf16", "fp16", "fp8", "int8", "int4"]
Positions: TypeAlias = Literal["all", "last", "mean", "shuffled"]
PLACES: tuple[str, ...] = get_args(Place)
STORED: tuple[str, ...] = get_args(Stored)
POSITIONS: tuple[str, ...] = get_args(Positions)


class Site(NamedTuple):
    """A place inside a block, beside the residual stream: what block ``block`` (1..L) computes there."""

    block: int
    kind: str  # keys, values, kv (keys beside values), attention or mlp (what is added to the stream)
    rotary: str = "after"  # keys: "after" or "before" rotary positions

    def __str__(self) -> str:
        return f"{self.block}.{self.kind}{'' if self.rotary == 'after' else '-before-rotary'}"


Tap: TypeAlias = Layer | Site  # where a pass can be looked into


def in_words(tap: Tap) -> str:
    """A tap as people are told of it: layer 15, keys of layer 15."""
    return f"{tap.kind} of layer {tap.block}" if isinstance(tap, Site) else f"layer {tap}"


@dataclass(frozen=True)
class Observation:
    """What was seen; ``observe=`` of an inversion takes one, or the name of a place alone.

    ``place``: ``residual`` (the output of block k), ``final``, ``keys``, ``values`` or ``kv`` (both, keys
    first) of block k as a cache holds them, ``attention`` or ``mlp`` (what block k adds to the stream).
    ``rotary``: keys ``after`` or ``before`` rotary positions. ``stored``: the type the numbers were kept in;
    None: found out from the numbers. ``positions``: ``all``, the ``last`` alone, the ``mean`` over all of
    them, or all in an unknown order (``shuffled``). ``kept``: the coordinates that were kept, in their order;
    all of them in another order is a known permutation. ``permuted``: coordinates in an unknown order, the
    same at every position. ``rotation``: a known orthogonal matrix R; rows h were turned into h R.
    ``rotated``: turned so by an unknown one, the same at every position. ``at``: the positions whose states
    were kept, counted from 0 and ascending, the same of every prompt; None: all.

    >>> from preimage import Observation
    >>> Observation("keys", stored="int8").tap(15, n_layers=30)
    Site(block=15, kind='keys', rotary='after')
    """

    place: str = "residual"
    rotary: str = "after"
    stored: str | None = None
    positions: str = "all"
    kept: tuple[int, ...] | None = None
    permuted: bool = False
    rotation: Any = None
    rotated: bool = False
    at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("observe", self.place, PLACES),
            ("rotary", self.rotary, ("after", "before")),
            ("positions", self.positions, POSITIONS),
            ("stored", self.stored, (None, *STORED)),
        ):
            if value not in allowed:
                names = ", ".join(str(one) for one in allowed if one is not None)
                raise OptionError(f"{name} {reprlib.repr(value)} is not known.", f"Use {names}.")
        if self.rotary == "before" and self.place not in ("keys", "kv"):
            raise OptionError(f"{self.place} has no rotary positions.", "Give rotary for keys or kv alone.")
        known = self.kept is not None or self.rotation is not None
        if self.permuted and known:
            raise OptionError(
                "permuted is for an unknown order.", "Leave out kept and rotation, or permuted."
            )
        if self.rotated and (known or self.permuted or self.positions != "all"):
            raise OptionError(
                "rotated is for an unknown rotation, the same at all positions.",
                "Leave out kept, rotation, permuted and positions, or rotated.",
            )

        if self.at is not None:
            self._check_at(self.at)

    def _check_at(self, at: tuple[int, ...]) -> None:
        ascending = all(isinstance(one, int) and one >= 0 for one in at) and list(at) == sorted(set(at))
        if not at or not ascending:
            raise OptionError(
                f"Positions {reprlib.repr(at)} are not ascending.", "Count them from 0, each once."
            )
        if self.positions != "all" or self.permuted or self.rotated:
            raise OptionError(
                "Some positions alone need their states as the model has them, one a position.",
                "Leave out positions, permuted and rotated, or at.",
            )

    @property
    def gaps(self) -> bool:
        """Whether the states of some positions are missing before the last one kept."""
        return self.at is not None and self.at != tuple(range(len(self.at)))

    @classmethod
    def of(cls, given: str | Observation | None) -> Observation:
        """An observation as it is given: itself, or the name of a place."""
        return given if isinstance(given, Observation) else cls(given or "residual")

    def tap(self, layer: int | str, n_layers: int) -> Tap:
        """Where a pass is looked into for it."""
        if self.place == "final":
            return "final"
        at = parse_layer(layer, n_layers)
        if self.place == "residual":
            return at
        if at == "final" or at == 0:
            raise OptionError(f"Layer {at} has no {self.place}.", f"Give a block, 1..{n_layers}.")
        return Site(at, self.place, self.rotary)

    def layers(self, spec: LayerSpec, n_layers: int) -> tuple[Layer, ...]:
        """The layers a specification means where it is seen there: of ``"all"``, those that have it."""
        if self.place == "final":
            return ("final",)
        if self.place != "residual" and isinstance(spec, str) and spec == "all":
            return tuple(range(1, n_layers + 1))
        layers = parse_layers(spec, n_layers)
        for layer in layers:
            self.tap(layer, n_layers)  # which refuses a layer that does not have it
        return layers

    @property
    def where(self) -> dict[str, Any]:
        """What a bundle's manifest says of it: everything but a rotation, which is undone before saving."""
        told = self.to_dict()
        return {name: value for name, value in told.items() if name != "rotation"}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Observation:
        """The inverse of :attr:`where`; what is not told is as the library captures it."""
        known = {name: told[name] for name in cls().where if name in told}
        for name in ("kept", "at"):
            if known.get(name) is not None:
                known[name] = tuple(map(int, known[name]))
        return cls(**known)

    @property
    def plain(self) -> bool:
        """Whether every number is where the model put it."""
        return self.kept is None and self.rotation is None and not (self.permuted or self.rotated)

    def changed(self, **changes: Any) -> Observation:
        """The same but for some fields."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types; a rotation by its shape alone."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["kept"] = None if self.kept is None else list(self.kept)
        values["rotation"] = None if self.rotation is None else list(self.rotation.shape)
        return values
