"""The results of a collision search: over prompts, and over the continuations of a prefix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from preimage.layers import Layer
from preimage.markup import Markup
from preimage.storage import Saved, dataframe
from preimage.views import Shown, Tone, details, named, table


@dataclass(frozen=True)
class ComparedPair:
    """Two prompts, or two next tokens, and how far apart their states are.

    ``first`` and ``second`` number the prompts that differ, in the order given; of hard pairs, their own.
    ``distance`` and ``noise_radius`` are in units of a state; ``noise_radius`` is what noise may put between
    the two: 16 noise floors of the longer state, as in an inversion.
    ``explanation`` says why the two states are the same for all parameters (or, of identical embeddings, for
    all others); within the noise radius, where nothing says why, it is "unexplained"; else empty.
    """

    first: int
    second: int
    first_ids: tuple[int, ...]
    second_ids: tuple[int, ...]
    first_text: str | None
    second_text: str | None
    distance: float
    noise_radius: float
    explanation: str


@dataclass(frozen=True)
class Spacing:
    """How far apart a set of states is; distances are in units of a state.

    ``closest_pair`` is the closest of all, ``closest`` the closest ones that must differ; ``margin`` is the
    distance of the first of these, ``normalised_margin`` the same over the mean norm. Quantiles are of the
    distances of all pairs, each with bounds that hold for certain. ``below`` counts pairs nearer than a
    threshold, ``within_noise`` those no farther apart than their noise radius, by ``explained`` reasons and
    ``unexplained``; ``listed`` are the first of these.
    """

    states: int
    pairs: int
    distinct: int  # states that are not the same to the bit
    closest_pair: ComparedPair
    closest: tuple[ComparedPair, ...]
    margin: float | None
    normalised_margin: float | None
    quantiles: dict[str, tuple[float, float, float]]  # q: value, proven lower and upper bound
    mean_norm: float
    noise_floor: float  # relative
    noise_radius: float  # of a state of the mean norm
    below: dict[str, int]
    within_noise: int
    explained: dict[str, int]
    unexplained: int
    listed: tuple[ComparedPair, ...]


@dataclass(frozen=True)
class HardKind:
    """The hard pairs of one kind: how many, the closest, the distance of the closest that must differ, how
    many are within their noise radius, how many explained.

    What must be the same for all parameters counts as explained even where rounding put it farther apart.
    """

    kind: str
    pairs: int
    closest_pair: ComparedPair
    margin: float | None
    within_noise: int
    explained: dict[str, int]
    unexplained: int


@dataclass(frozen=True)
class LayerCollisions:
    """All pairs of prompts at one layer; hard pairs are reported apart."""

    layer: Layer
    spacing: Spacing
    hard: tuple[HardKind, ...]

    @property
    def unexplained(self) -> int:
        """Pairs within their noise radius that nothing explains."""
        return self.spacing.unexplained + sum(kind.unexplained for kind in self.hard)


@dataclass(frozen=True, repr=False)
class CollisionAudit(Saved, Shown):
    """Every pair of a set of prompts compared at every chosen layer."""

    _kind = "collisions"

    model: dict[str, Any]
    prompts: int
    duplicates_removed: int
    lengths: tuple[int, int]  # shortest and longest
    source: str  # of the prompts, "list" where they were given one by one
    fingerprint: str  # of the prompts
    options: dict[str, Any]
    layers: tuple[LayerCollisions, ...]

    @property
    def unexplained(self) -> int:
        """Pairs within their noise radius that nothing explains, over all layers."""
        return sum(layer.unexplained for layer in self.layers)

    def at(self, layer: Layer) -> LayerCollisions:
        """The pairs at one layer."""
        return next(one for one in self.layers if one.layer == layer)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self) | {"unexplained": self.unexplained}

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a layer, for tables."""
        return [_row({"layer": str(one.layer)}, one.spacing) for one in self.layers]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a layer."""
        return dataframe(self.rows())

    def _line(self) -> str:
        where = f"{self.prompts:,} prompts at {len(self.layers)} layers of {named(self.model)}"
        return f"{_found(self.unexplained)} among {where}"

    def _tone(self) -> Tone:
        return "bad" if self.unexplained else "good"

    def _parts(self) -> Iterable[Markup]:
        yield table(self.rows(), columns=("layer", *_SHOWN))
        for layer in self.layers[-1:]:
            yield details(f"The closest pairs at layer {layer.layer}", _pairs(layer.spacing))


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
        return self.spacing.margin


@dataclass(frozen=True, repr=False)
class ContinuationScan(Saved, Shown):
    """Exhaustive continuations of a few prefixes at one layer."""

    _kind = "continuations"

    model: dict[str, Any]
    layer: Layer
    options: dict[str, Any]
    prefixes: tuple[Continuation, ...]

    @property
    def unexplained(self) -> int:
        """Pairs of tokens within their noise radius that nothing explains."""
        return sum(prefix.spacing.unexplained for prefix in self.prefixes)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        margins = [{**asdict(prefix), "margin": prefix.margin} for prefix in self.prefixes]
        return asdict(self) | {"prefixes": margins, "unexplained": self.unexplained}

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a prefix, for tables."""
        return [
            _row({"prefix": index, "text": prefix.text or str(list(prefix.prefix))}, prefix.spacing)
            for index, prefix in enumerate(self.prefixes)
        ]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a prefix."""
        return dataframe(self.rows())

    def _line(self) -> str:
        return (
            f"{_found(self.unexplained)} among all next tokens of {len(self.prefixes)} prefixes at layer "
            f"{self.layer} of {named(self.model)}"
        )

    def _tone(self) -> Tone:
        return "bad" if self.unexplained else "good"

    def _parts(self) -> Iterable[Markup]:
        yield table(self.rows(), columns=("prefix", "text", *_SHOWN))
        for one in self.prefixes[:1]:
            yield details("The closest next tokens of the first prefix", _pairs(one.spacing))


def _row(head: dict[str, Any], spacing: Spacing) -> dict[str, Any]:
    quantiles = {f"q{q}": values[0] for q, values in spacing.quantiles.items()}
    below = {f"below_{threshold}": count for threshold, count in spacing.below.items()}
    return {
        **head,
        "states": spacing.states,
        "pairs": spacing.pairs,
        "distinct": spacing.distinct,
        "closest_distance": spacing.closest_pair.distance,
        "margin": spacing.margin,
        "normalised_margin": spacing.normalised_margin,
        **quantiles,
        "mean_norm": spacing.mean_norm,
        "noise_floor": spacing.noise_floor,
        "noise_radius": spacing.noise_radius,
        **below,
        "within_noise": spacing.within_noise,
        "unexplained": spacing.unexplained,
    }


_SHOWN = ("pairs", "distinct", "margin", "normalised_margin", "mean_norm", "noise_radius", "within_noise",
          "unexplained")  # fmt: skip


def _pairs(spacing: Spacing) -> Markup:
    """The closest pairs that must differ, with what they are."""
    return table(
        [
            {
                "distance": pair.distance,
                "noise radius": pair.noise_radius,
                "one": pair.first_text or str(list(pair.first_ids)),
                "other": pair.second_text or str(list(pair.second_ids)),
                "why": pair.explanation,
            }
            for pair in spacing.closest
        ]
    )


def _found(unexplained: int) -> str:
    return "no unexplained collision" if not unexplained else f"{unexplained} unexplained collisions"
