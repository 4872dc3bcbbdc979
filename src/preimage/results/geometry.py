"""The result of measuring how far from a collision a set of states is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preimage.layers import Layer
from preimage.results.files import write_json
from preimage.schema import SCHEMA


@dataclass(frozen=True)
class StepReport:
    """What a quantiser did to the states of a layer.

    ``step`` is the largest there is, ``relative_step`` the same over the mean absolute coordinate,
    ``occupancy`` the share of coordinates whose code is not that of 0. ``certified``: the margin before
    exceeds step * sqrt(d), so that no two states can have got the same codes.
    """

    bits: int
    step: float
    relative_step: float
    occupancy: float
    certified: bool


@dataclass(frozen=True)
class LayerGeometry:
    """One layer. D is the distance of two states, d that of their prompts.

    ``margin`` is the smallest D, ``margin_quantile`` a quantile of the prompts' own smallest D.
    ``colipschitz`` is the smallest D/d over all pairs, its quantile over the prompts' own smallest; the
    ``nearest`` ones take the ratio at the prompt's nearest state instead. Normalised values are over the mean
    norm; ``length_colipschitz`` takes d over the prompt length, None where lengths differ. ``collisions``
    counts pairs of equal states (equal codes, where quantised), ``near_collisions`` shares of all pairs.
    """

    layer: Layer
    states: int
    pairs: int
    distinct: int
    mean_norm: float
    margin: float
    margin_quantile: float
    normalised_margin: float
    normalised_margin_quantile: float
    colipschitz: float
    colipschitz_quantile: float
    nearest_colipschitz: float
    nearest_colipschitz_quantile: float
    normalised_colipschitz: float
    normalised_colipschitz_quantile: float
    length_colipschitz: float | None
    length_colipschitz_quantile: float | None
    upper: float  # the largest D/d
    distortion: float | None  # upper over colipschitz; None where that is 0
    collisions: int
    near_collisions: dict[str, float]
    relative_near_collisions: dict[str, float]
    anisotropy: float  # mean cosine of two states
    intrinsic_dimension: float | None  # TwoNN
    quantised: StepReport | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerGeometry:
        """The inverse of ``asdict``."""
        report = data["quantised"]
        return cls(**data | {"quantised": None if report is None else StepReport(**report)})


@dataclass(frozen=True)
class LayerSet:
    """Layers by number."""

    layers: dict[Layer, LayerGeometry]


@dataclass(frozen=True)
class Geometry:
    """How far from a collision: full precision in ``layers``, fewer bits in ``quantised``."""

    prompts: int
    prompt_distance: str  # hamming or levenshtein
    options: dict[str, Any]
    layers: dict[Layer, LayerGeometry]
    quantised: dict[int, LayerSet]

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Geometry:
        """The inverse of ``to_dict``, also after json made text of the layers' numbers."""
        few = {int(bits): LayerSet(_by_layer(some["layers"])) for bits, some in data["quantised"].items()}
        return cls(**data | {"layers": _by_layer(data["layers"]), "quantised": few})

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a layer and precision, for tables; bits are None in full precision."""
        found = []
        for bits, layers in ((None, self.layers), *((b, q.layers) for b, q in self.quantised.items())):
            for layer, measured in layers.items():
                row: dict[str, Any] = {"bits": bits, **asdict(measured), "layer": str(layer)}
                for name in ("near_collisions", "relative_near_collisions"):
                    row |= {f"{name}_{eps}": share for eps, share in row.pop(name).items()}
                report = row.pop("quantised") or {}
                names = ("step", "relative_step", "occupancy", "certified")
                found.append(row | {name: report.get(name) for name in names})
        return found

    def save(self, path: str | Path) -> Path:
        """Write one json document."""
        return write_json(Path(path), {"schema": SCHEMA, "kind": "geometry", **self.to_dict()})


def _by_layer(layers: dict[Any, dict[str, Any]]) -> dict[Layer, LayerGeometry]:
    return {
        "final" if layer == "final" else int(layer): LayerGeometry.from_dict(found)
        for layer, found in layers.items()
    }
