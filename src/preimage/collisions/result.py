"""The results of a collision search: over prompts, and over the continuations of a prefix."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preimage.layers import Layer
from preimage.storage import SCHEMA, write_json


@dataclass(frozen=True)
class CollidingPair:
    """Two prompts, or two next tokens, and how far apart their states are.

    ``first`` and ``second`` number the prompts that differ, in the order given; of hard pairs, their own.
    ``floor`` is what noise may put between the two: 16 noise floors of the longer, as in an inversion.
    ``explanation`` says why the two states are the same for all parameters (or, of identical embeddings, for
    all others); at or under the floor, where nothing says why, it is "unexplained"; else empty.
    """

    first: int
    second: int
    first_ids: tuple[int, ...]
    second_ids: tuple[int, ...]
    first_text: str | None
    second_text: str | None
    distance: float
    floor: float
    explanation: str

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CollidingPair:
        """The inverse of ``asdict``."""
        return cls(**data | {name: tuple(data[name]) for name in ("first_ids", "second_ids")})


@dataclass(frozen=True)
class Spacing:
    """How far apart a set of states is.

    ``minimum`` is the closest pair of all, ``closest`` the closest ones that must differ; ``separation`` is
    the distance of the first of these, ``normalised`` the same over the mean norm. Quantiles are of the
    distances of all pairs, each with bounds that hold for certain. ``below`` counts pairs nearer than a
    threshold, ``at_floor`` those no farther apart than rounding alone may put them, by ``explained`` reasons
    and ``unexplained``; ``listed`` are the first of these.
    """

    states: int
    pairs: int
    distinct: int  # states that are not the same to the bit
    minimum: CollidingPair
    closest: tuple[CollidingPair, ...]
    separation: float | None
    normalised: float | None
    quantiles: dict[str, tuple[float, float, float]]  # q: value, proven lower and upper bound
    mean_norm: float
    noise_floor: float  # relative
    floor: float  # what counts as the same but for noise, at the mean norm
    below: dict[str, int]
    at_floor: int
    explained: dict[str, int]
    unexplained: int
    listed: tuple[CollidingPair, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Spacing:
        """The inverse of ``asdict``."""
        return cls(**data | _nested(data))


@dataclass(frozen=True)
class HardKind:
    """The hard pairs of one kind: how many, the closest, the distance of the closest that must differ, how
    many at or under the floor, how many explained.

    What must be the same for all parameters counts as explained even where rounding put it above the floor.
    """

    kind: str
    pairs: int
    minimum: CollidingPair
    separation: float | None
    at_floor: int
    explained: dict[str, int]
    unexplained: int

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HardKind:
        """The inverse of ``asdict``."""
        return cls(**data | {"minimum": CollidingPair.from_dict(data["minimum"])})


@dataclass(frozen=True)
class LayerCollisions:
    """What was found at one layer; hard pairs are reported apart."""

    layer: Layer
    spacing: Spacing
    hard: tuple[HardKind, ...]

    @property
    def unexplained(self) -> int:
        """Pairs at or under the floor that nothing explains."""
        return self.spacing.unexplained + sum(kind.unexplained for kind in self.hard)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerCollisions:
        """The inverse of ``asdict``."""
        hard = tuple(HardKind.from_dict(kind) for kind in data["hard"])
        return cls(data["layer"], Spacing.from_dict(data["spacing"]), hard)


@dataclass(frozen=True)
class CollisionAudit:
    """Every pair of a set of prompts compared at every chosen layer."""

    model: dict[str, Any]
    prompts: int
    duplicates_removed: int
    lengths: tuple[int, int]  # shortest and longest
    fingerprint: str  # of the prompts
    options: dict[str, Any]
    layers: tuple[LayerCollisions, ...]

    @property
    def unexplained(self) -> int:
        """Pairs at or under the noise floor that nothing explains, over all layers."""
        return sum(layer.unexplained for layer in self.layers)

    def at(self, layer: Layer) -> LayerCollisions:
        """One layer's findings."""
        return next(found for found in self.layers if found.layer == layer)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"unexplained": self.unexplained}

    def save(self, path: str | Path) -> Path:
        """Write one json document."""
        return write_json(Path(path), {"schema": SCHEMA, "kind": "collisions", **self.to_dict()})

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a layer, for tables."""
        return [_row({"layer": str(found.layer)}, found.spacing) for found in self.layers]

    def _repr_html_(self) -> str:
        return _html_table(self.rows())


@dataclass(frozen=True)
class Continuation:
    """Every vocabulary token after one prefix, compared with every other.

    ``spacing.closest[0].distance`` is the margin D(prefix, t) over tokens that must differ; with tokens of
    identical embeddings the margin over all tokens is 0.
    """

    prefix: tuple[int, ...]
    text: str | None
    layer: Layer
    spacing: Spacing

    @property
    def margin(self) -> float | None:
        """D(prefix, t) over tokens whose embeddings differ."""
        return self.spacing.separation

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Continuation:
        """The inverse of ``asdict``."""
        return cls(**data | {"prefix": tuple(data["prefix"]), "spacing": Spacing.from_dict(data["spacing"])})


@dataclass(frozen=True)
class ContinuationScan:
    """Exhaustive continuations of a few prefixes at one layer."""

    model: dict[str, Any]
    layer: Layer
    options: dict[str, Any]
    prefixes: tuple[Continuation, ...]

    @property
    def unexplained(self) -> int:
        """Pairs of tokens at or under the noise floor that nothing explains."""
        return sum(prefix.spacing.unexplained for prefix in self.prefixes)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        margins = [{**asdict(prefix), "margin": prefix.margin} for prefix in self.prefixes]
        return asdict(self) | {"prefixes": margins, "unexplained": self.unexplained}

    def save(self, path: str | Path) -> Path:
        """Write one json document."""
        return write_json(Path(path), {"schema": SCHEMA, "kind": "continuations", **self.to_dict()})

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a prefix, for tables."""
        return [
            _row({"prefix": index, "text": prefix.text or str(list(prefix.prefix))}, prefix.spacing)
            for index, prefix in enumerate(self.prefixes)
        ]

    def _repr_html_(self) -> str:
        return _html_table(self.rows())


def _nested(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "minimum": CollidingPair.from_dict(data["minimum"]),
        "closest": tuple(CollidingPair.from_dict(pair) for pair in data["closest"]),
        "listed": tuple(CollidingPair.from_dict(pair) for pair in data["listed"]),
        "quantiles": {q: tuple(values) for q, values in data["quantiles"].items()},
    }


def _row(head: dict[str, Any], spacing: Spacing) -> dict[str, Any]:
    quantiles = {f"q{q}": values[0] for q, values in spacing.quantiles.items()}
    below = {f"below_{threshold}": count for threshold, count in spacing.below.items()}
    return {
        **head,
        "states": spacing.states,
        "pairs": spacing.pairs,
        "distinct": spacing.distinct,
        "minimum": spacing.minimum.distance,
        "separation": spacing.separation,
        "normalised": spacing.normalised,
        **quantiles,
        "mean_norm": spacing.mean_norm,
        "noise_floor": spacing.noise_floor,
        "floor": spacing.floor,
        **below,
        "at_floor": spacing.at_floor,
        "unexplained": spacing.unexplained,
    }


def _html_table(rows: list[dict[str, Any]]) -> str:
    def cells(tag: str, values: Any) -> str:
        shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
        return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in shown)

    head = cells("th", rows[0]) if rows else ""
    body = "".join(f"<tr>{cells('td', row.values())}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
