"""The result of measuring how far from a collision a set of states is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from preimage.layers import Layer
from preimage.markup import Markup
from preimage.storage import Saved, dataframe
from preimage.views import Shown, Tone, details, number, table


@dataclass(frozen=True)
class StepReport:
    """What a quantiser did to the states of a layer.

    ``step`` is the largest there is, ``relative_step`` the same over the mean absolute coordinate,
    ``occupancy`` the share of coordinates whose code is not that of 0. ``certified``: the margin before
    exceeds step * sqrt(d), and twice the way any state moved where coordinates were cut off, so that no two
    states can have got the same codes; None where the quantised states were carried on through the network,
    about which the margin says nothing.
    """

    bits: int
    step: float
    relative_step: float
    occupancy: float
    certified: bool | None


@dataclass(frozen=True)
class Interval:
    """A quantity on random subsets of the prompts: its mean, and where 95 % of the subsets lie."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Subsets:
    """Quantities by name on ``count`` random subsets of ``size`` prompts.

    Nearest distances shrink with the number of prompts, so these are values for ``size`` prompts, to be
    compared with those of as many.
    """

    count: int
    size: int
    intervals: dict[str, Interval]


@dataclass(frozen=True)
class LayerGeometry:
    """One layer. D is the distance of two states, d that of their prompts.

    ``margin`` is the smallest D, ``margin_quantile`` a quantile of the prompts' own smallest D.
    ``colipschitz`` is the smallest D/d over all pairs, its quantile over the prompts' own smallest; the
    ``nearest`` ones take the ratio at the prompt's nearest state instead. Normalised values are over the mean
    norm; ``length_colipschitz`` takes d over the prompt length, None where lengths differ. ``collisions``
    counts pairs of equal states (equal codes, where quantised), ``near_collisions`` shares of all pairs.
    ``unexplained`` are the collisions in full precision that no structure of the model makes; where the model
    was not there to be asked, all but those of the same last token at layer 0.
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
    lipschitz: float  # the largest D/d
    distortion: float | None  # lipschitz over colipschitz; None where that is 0
    collisions: int
    near_collisions: dict[str, float]
    relative_near_collisions: dict[str, float]
    anisotropy: float  # mean cosine of two states
    intrinsic_dimension: float | None  # TwoNN
    quantised: StepReport | None = None
    subsets: Subsets | None = None  # in full precision
    unexplained: int | None = None  # in full precision


@dataclass(frozen=True)
class LayerSet:
    """Layers by number."""

    layers: dict[Layer, LayerGeometry]


@dataclass(frozen=True, repr=False)
class Geometry(Saved, Shown):
    """How far from a collision: full precision in ``layers``, fewer bits in ``quantised``."""

    _kind = "geometry"

    prompts: int
    prompt_distance: str  # hamming or levenshtein
    options: dict[str, Any]
    layers: dict[Layer, LayerGeometry]
    quantised: dict[int, LayerSet]
    length: int | None = None  # tokens of every prompt, None where they differ
    source: str | None = None  # of the prompts, where it is known

    @property
    def unexplained(self) -> int:
        """Collisions in full precision, over all layers, that nothing explains."""
        return sum(measured.unexplained or 0 for measured in self.layers.values())

    @property
    def sets(self) -> dict[str, dict[Layer, LayerGeometry]]:
        """Every precision by its name, full precision first."""
        fewer = {f"{bits} bits": some.layers for bits, some in self.quantised.items()}
        return {"full precision": self.layers, **fewer}

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a layer and precision, for tables; bits are None in full precision."""
        rows = []
        for bits, layers in ((None, self.layers), *((b, q.layers) for b, q in self.quantised.items())):
            for layer, measured in layers.items():
                row: dict[str, Any] = {"bits": bits, **asdict(measured), "layer": str(layer)}
                for name in ("near_collisions", "relative_near_collisions"):
                    row |= {f"{name}_{eps}": share for eps, share in row.pop(name).items()}
                report, subsets = row.pop("quantised") or {}, row.pop("subsets") or {"intervals": {}}
                row["subset_size"] = subsets.get("size")
                for name, interval in subsets["intervals"].items():
                    row |= {f"{name}_{end}": value for end, value in interval.items()}
                names = ("step", "relative_step", "occupancy", "certified")
                rows.append(row | {name: report.get(name) for name in names})
        return rows

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a layer and precision."""
        return dataframe(self.rows())

    def _line(self) -> str:
        deepest = list(self.layers.values())[-1]
        return (
            f"geometry of {self.prompts:,} prompts at {len(self.layers)} layers: margin "
            f"{number(deepest.margin)}, co-Lipschitz {number(deepest.colipschitz)} at layer {deepest.layer}, "
            f"{_found(self.unexplained)}"
        )

    def _tone(self) -> Tone:
        return "bad" if self.unexplained else "good"

    def _parts(self) -> Iterable[Markup]:
        yield table(self.rows(), columns=_SHOWN)


@dataclass(frozen=True)
class Setting:
    """What tells one run of a sweep from the others; the quantiser by its granularity and range."""

    model: str
    length: int | None
    dtype: str
    quantiser: str

    @property
    def name(self) -> str:
        """The same in a file name's characters."""
        length = "whole" if self.length is None else f"{self.length}-tokens"
        return "_".join((re.sub(r"[^\w.-]+", "-", self.model), length, self.dtype, self.quantiser))


@dataclass(frozen=True)
class SweptGeometry:
    """One run of a sweep; ``identity`` is that of the model."""

    setting: Setting
    identity: dict[str, Any]
    geometry: Geometry


@dataclass(frozen=True, repr=False)
class GeometrySweep(Saved, Shown):
    """The same measurement over models, lengths, dtypes and quantisers, on equally many prompts."""

    _kind = "geometry-sweep"
    runs: tuple[SweptGeometry, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GeometrySweep:
        """The inverse of :meth:`to_dict`."""
        runs = []
        for run in data["runs"]:
            setting = Setting(run["model"], run["length"], run["dtype"], run["quantiser"])
            geometry = Geometry.from_dict(run | {"length": run["prompt_length"]})
            runs.append(SweptGeometry(setting, run["identity"], geometry))
        return cls(tuple(runs))

    def to_dict(self) -> dict[str, Any]:
        """Plain json types; ``length`` is the sweep's, ``prompt_length`` what all prompts have."""
        return {
            "runs": [
                {
                    **run.geometry.to_dict(),
                    **asdict(run.setting),
                    "prompt_length": run.geometry.length,
                    "identity": run.identity,
                }
                for run in self.runs
            ]
        }

    def by_length(self) -> dict[str, dict[int, Geometry]]:
        """What was measured at several lengths and otherwise alike, by what it has in common."""
        alike: dict[str, dict[int, Geometry]] = {}
        for run in self.runs:
            if run.setting.length is not None:
                name = replace(run.setting, length=None).name.replace("_whole", "")
                alike.setdefault(name, {})[run.setting.length] = run.geometry
        return {name: lengths for name, lengths in alike.items() if len(lengths) > 1}

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a run, layer and precision."""
        return [{**asdict(run.setting), **row} for run in self.runs for row in run.geometry.rows()]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a run, layer and precision."""
        return dataframe(self.rows())

    def _line(self) -> str:
        unexplained = sum(run.geometry.unexplained for run in self.runs)
        return f"geometry of {len(self.runs)} run{'s' * (len(self.runs) != 1)}, {_found(unexplained)}"

    def _tone(self) -> Tone:
        return "bad" if any(run.geometry.unexplained for run in self.runs) else "good"

    def _parts(self) -> Iterable[Markup]:
        for run in self.runs:
            at = run.setting
            length = "whole prompts" if at.length is None else f"{at.length} tokens"
            summary = f"{at.model}, {length}, {at.dtype}, {at.quantiser}"
            yield details(summary, table(run.geometry.rows(), columns=_SHOWN))


_SHOWN = ("layer", "bits", "pairs", "margin", "margin_quantile", "normalised_margin_quantile", "colipschitz",
          "colipschitz_quantile", "mean_norm", "collisions", "anisotropy", "intrinsic_dimension")  # fmt: skip


def _found(unexplained: int) -> str:
    return f"{unexplained} unexplained collisions" if unexplained else "no unexplained collision"
