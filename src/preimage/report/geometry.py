"""Geometry on a page: margins and co-Lipschitz constants by layer, near-collisions, fewer bits, sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preimage.figures.geometry import (
    family_figure,
    layer_figure,
    length_figure,
    near_collision_figure,
    quantised_figure,
)
from preimage.figures.style import made_by, named
from preimage.geometry.result import Geometry, GeometrySweep, LayerGeometry
from preimage.layers import Layer
from preimage.report.opened import Opened, Summary, made_together
from preimage.report.page import Section
from preimage.report.parts import Cell, Column, Details, Figure, Paragraph, Part, Table

_CURVES = 12  # measurements in one figure
_MAPS = 6  # of a sweep whose near-collisions are drawn
_NUMBERS = {
    "mean norm": "mean_norm", "margin": "margin", "margin, quantile": "margin_quantile",
    "/ norm": "normalised_margin_quantile", "co-Lipschitz": "colipschitz",
    "co-Lipschitz, quantile": "colipschitz_quantile", "/ norm ": "normalised_colipschitz_quantile",
    "distortion": "distortion", "anisotropy": "anisotropy", "dimension": "intrinsic_dimension",
}  # fmt: skip


def summary(opened: Opened) -> Summary:
    """How far from a collision the states are."""
    shape: Geometry = opened.result
    what = f"{shape.prompts:,} prompts{_long(shape.length)}, {len(shape.layers)} layers"
    if shape.unexplained:
        headline = f"{shape.unexplained:,} collisions in full precision that nothing explains: {what}."
        return Summary(headline, _findings(shape), "bad")
    return Summary(f"No unexplained collision in full precision: {what}.", _findings(shape), "good")


def _long(length: int | None) -> str:
    return "" if length is None else f" of {length} tokens"


def _findings(shape: Geometry) -> list[str]:
    layers = {name: one for name, one in shape.layers.items() if name != 0} or shape.layers
    layer, least = min(layers.items(), key=lambda item: item[1].normalised_margin)
    quantile = f"{100 * shape.options['quantile']:g} %" if "quantile" in shape.options else "low"
    said = [
        f"Margin: the nearest two states{' above layer 0' if 0 in shape.layers else ''} are "
        f"{least.margin:.4g} apart, {least.normalised_margin:.3g} of a state's length, at layer {layer}.",
        f"Quantiles are over the prompts' own nearest distances: {quantile} of the prompts are nearer.",
    ]
    kind = shape.prompt_distance
    if kind:
        ratio = min(one.colipschitz for one in layers.values())
        said.append(
            f"Co-Lipschitz constant: states are at least {ratio:.3g} apart for every token in which the "
            f"prompts differ ({kind} distance)."
        )
    for bits, some in shape.quantised.items():
        collided = {name: one.collisions for name, one in some.layers.items() if name != 0}
        number, worst = sum(collided.values()), max(collided, key=lambda name: collided[name], default=0)
        certified = [one.quantised.certified for one in some.layers.values() if one.quantised]
        said.append(
            f"In {bits} bits {number:,} pairs have become one over all layers above 0"
            + (f", most at layer {worst} ({collided[worst]:,})." if number else ".")
            + (
                f" At {sum(map(bool, certified))} of {len(certified)} layers none can."
                if any(certified)
                else ""
            )
        )
    return said


def sections(opened: Opened) -> list[Section]:
    """Curves by layer, near-collisions, fewer bits, everything in numbers."""
    shape: Geometry = opened.result
    found = [Section("By layer", _curves({"this run": shape}, opened.about))]
    found.append(Section("Near-collisions", [_map(shape, opened.about)]))
    if shape.quantised:
        figure = named(quantised_figure(shape, stacked=True), opened.about)
        words = " ".join(
            f"{bits} bits: {sum(one.collisions for one in some.layers.values()):,} pairs of equal states."
            for bits, some in shape.quantised.items()
        )
        found.append(
            Section("In fewer bits", [Figure(figure, f"Full precision against fewer bits. {words}")])
        )
    found.append(Section("In numbers", [_table(name, layers) for name, layers in shape.sets.items()]))
    return found


def compare(runs: Sequence[Opened]) -> list[Part]:
    """Measurements on equally many prompts, in one figure."""
    shapes: dict[str, Geometry] = {run.name: run.result for run in runs}
    return [_overview(shapes, {run.name: run.about for run in runs}), *_together(shapes, made_together(runs))]


def sweep_summary(opened: Opened) -> Summary:
    """What was varied, and whether anything collided."""
    sweep: GeometrySweep = opened.result
    unexplained = sum(run.geometry.unexplained for run in sweep.runs)
    settings = [run.setting for run in sweep.runs]
    varied = [
        f"{len(values)} {name}"
        for name, values in (
            ("models", {one.model for one in settings}), ("lengths", {one.length for one in settings}),
            ("dtypes", {one.dtype for one in settings}), ("quantisers", {one.quantiser for one in settings}),
        ) if len(values) > 1
    ]  # fmt: skip
    what = f"{len(sweep.runs)} measurements ({', '.join(varied) or 'one setting'})"
    if unexplained:
        return Summary(f"{unexplained:,} collisions that nothing explains, over {what}.", [], "bad")
    return Summary(f"No unexplained collision in full precision over {what}.", [], "good")


def sweep_sections(opened: Opened) -> list[Section]:
    """All runs of a sweep together, and each in numbers."""
    sweep: GeometrySweep = opened.result
    shapes = {run.setting.name: run.geometry for run in sweep.runs}
    commit = opened.commit
    abouts = {run.setting.name: made_by(run.identity, commit) for run in sweep.runs}
    parts = [_overview(shapes, abouts), *_together(shapes, opened.about)]
    by_length = sweep.by_length()
    if by_length:
        figure = named(length_figure(by_length, stacked=True), opened.about)
        words = f"The last layer against prompt length: {', '.join(by_length)}."
        parts.append(Figure(figure, words, "Dashed: random tenths of the prompts, with 95 % of them."))
    maps: list[Part] = [_map(shape, abouts[name], name) for name, shape in list(shapes.items())[:_MAPS]]
    if len(shapes) > _MAPS:
        maps.append(Paragraph(f"Those of {len(shapes) - _MAPS} more are in their run folders."))
    numbers: list[Part] = [
        Details(name, [_table(which, layers) for which, layers in shape.sets.items()])
        for name, shape in shapes.items()
    ]
    return [Section("All together", parts), Section("Near-collisions", maps), Section("In numbers", numbers)]


def _together(shapes: Mapping[str, Geometry], about: str) -> list[Part]:
    """Curves of measurements on equally many prompts; others are not drawn in one figure."""
    counts = {shape.prompts for shape in shapes.values()}
    if len(counts) > 1:
        return [Paragraph(
            "Nearest distances shrink with the number of prompts, and these runs differ in it "
            f"({', '.join(f'{count:,}' for count in sorted(counts))}): they are not drawn in one figure."
        )]  # fmt: skip
    some = dict(list(shapes.items())[:_CURVES])
    parts = _curves(some, about)
    if len(some) < len(shapes):
        parts.append(Paragraph(f"Drawn are the first {len(some)} of {len(shapes)}."))
    return parts


def _curves(shapes: Mapping[str, Geometry], about: str) -> list[Part]:
    raw, relative = layer_figure(shapes, stacked=True), family_figure(shapes, stacked=True)
    raw_words, relative_words = (
        _words(shapes, "margin_quantile"),
        _words(shapes, "normalised_margin_quantile"),
    )
    return [
        Figure(named(raw, about), f"Mean norm, margin and co-Lipschitz constant by layer. {raw_words}"),
        Figure(named(relative, about), f"The same over the mean norm, by depth. {relative_words}"),
    ]


def _words(shapes: Mapping[str, Geometry], field: str) -> str:
    said = []
    for name, shape in shapes.items():
        values = [float(getattr(one, field)) for one in shape.layers.values()]
        said.append(f"{name}: margin quantile from {min(values):.3g} to {max(values):.3g}.")
    return " ".join(said)


def _map(shape: Geometry, about: str, name: str = "") -> Figure | Paragraph:
    """The map, or a sentence where it would be blank."""
    if not any(_most(layers) for layers in shape.sets.values()):
        return Paragraph(
            f"{name + ': n' if name else 'N'}o two states are nearer than any eps, at any layer."
        )
    figure = named(near_collision_figure(shape), f"{name}, {about}" if name else about)
    words = " ".join(
        f"{which}: at most {_most(layers):.3g} of all pairs." for which, layers in shape.sets.items()
    )
    return Figure(figure, f"Shares of pairs nearer than eps, by layer. {words}")


def _most(layers: Mapping[Layer, LayerGeometry]) -> float:
    return max(max(one.near_collisions.values(), default=0.0) for one in layers.values())


def _overview(shapes: Mapping[str, Geometry], abouts: Mapping[str, str]) -> Table:
    rows: list[list[str | Cell]] = []
    for name, shape in shapes.items():
        last = list(shape.layers.values())[-1]
        rows.append([
            name, abouts[name], f"{shape.prompts:,}", _long(shape.length).removeprefix(" of "),
            f"{last.normalised_margin_quantile:.3g}", f"{last.normalised_colipschitz_quantile:.3g}",
            Cell(f"{shape.unexplained:,}", "bad" if shape.unexplained else "plain"),
        ])  # fmt: skip
    names = ("prompts", "length", "margin quantile / norm", "co-Lipschitz quantile / norm", "unexplained")
    columns: list[str | Column] = ["run", "by", *(Column(one, numeric=True) for one in names)]
    return Table(columns, rows, "Measurements; margin and co-Lipschitz constant of the last layer")


def _table(name: str, layers: Mapping[Layer, LayerGeometry]) -> Table:
    rows = []
    for layer, one in layers.items():
        numbers = [getattr(one, field) for field in _NUMBERS.values()]
        shown = ["" if number is None else f"{number:.3g}" for number in numbers]
        rows.append([str(layer), *shown, f"{one.collisions:,}"])
    columns: list[str | Column] = [
        "layer",
        *(Column(title.strip(), numeric=True) for title in (*_NUMBERS, "collisions")),
    ]
    return Table(columns, rows, name)
