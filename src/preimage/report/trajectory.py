"""A training on a page: geometry and loss along it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from preimage.figures.style import named
from preimage.figures.trajectory import trajectory_figure
from preimage.report.opened import Opened, Summary, made_together
from preimage.report.page import Section
from preimage.report.parts import Column, Figure, Part, Table
from preimage.training.result import Trajectory

_DRIFTS = {"normalised_margin_quantile": "margin", "normalised_colipschitz_quantile": "co-Lipschitz constant"}


def summary(opened: Opened) -> Summary:
    """How near to a collision the training came."""
    run: Trajectory = opened.result
    unexplained = sum(at.geometry.unexplained for at in run.checkpoints)
    least = run.smallest
    findings = [
        f"The smallest margin of all: {least.margin:.4g} at step {least.step}, layer {least.layer}, "
        f"{least.normalised_margin:.3g} of a state's length.",
        f"Held-out loss from {run.checkpoints[0].held_out_loss:.3f} to "
        f"{run.checkpoints[-1].held_out_loss:.3f} nats a token.",
    ]
    if len(run.checkpoints) > 1:
        for quantity, word in _DRIFTS.items():
            drift = run.drift(quantity)
            findings.append(
                f"The normalised {word}, smallest over layers, changed by {_percent(drift.from_start)} from "
                f"initialisation and by {_percent(drift.second_half)} since step {drift.half_step}."
            )
    what = f"{len(run.checkpoints)} checkpoints up to step {run.checkpoints[-1].step}"
    if unexplained:
        return Summary(f"{unexplained:,} collisions that nothing explains, at {what}.", findings, "bad")
    return Summary(f"No two probes came to share a state: {what}.", findings, "good")


def sections(opened: Opened) -> list[Section]:
    """The curves, and every checkpoint in numbers."""
    run: Trajectory = opened.result
    rows = []
    for at in run.checkpoints:
        layer, margin = at.smallest("margin")
        numbers = (
            at.held_out_loss, margin, at.smallest("normalised_margin_quantile")[1],
            at.last.normalised_margin_quantile, at.smallest("normalised_colipschitz_quantile")[1],
            at.last.normalised_colipschitz_quantile,
        )  # fmt: skip
        loss = "" if at.training_loss is None else f"{at.training_loss:.3f}"
        rows.append([
            str(at.step), loss, *(f"{number:.3g}" for number in numbers[:2]), str(layer),
            *(f"{number:.3g}" for number in numbers[2:]), f"{at.collisions:,}",
        ])  # fmt: skip
    ratios = ("margin quantile / norm, smallest", "last layer", "co-Lipschitz / norm, smallest", "last layer")
    names = ("training loss", "held-out loss", "smallest margin", "at layer", *ratios, "collisions")
    columns: list[str | Column] = ["step", *(Column(name, numeric=True) for name in names)]
    return [
        Section("Along the training", [_figure({run.model["name"]: run}, opened.about)]),
        Section("In numbers", [Table(columns, rows, "Checkpoints; smallest over the layers above 0")]),
    ]


def compare(runs: Sequence[Opened]) -> list[Part]:
    """Trainings in one figure."""
    return [_figure({run.name: run.result for run in runs}, made_together(runs))]


def _figure(shapes: Mapping[str, Trajectory], about: str) -> Figure:
    words = " ".join(
        f"{name}: smallest margin {run.smallest.margin:.3g} at step {run.smallest.step}; held-out loss "
        f"{run.checkpoints[0].held_out_loss:.3g} to {run.checkpoints[-1].held_out_loss:.3g}."
        for name, run in shapes.items()
    )
    return Figure(
        named(trajectory_figure(shapes, stacked=True), about), f"Geometry and loss by step. {words}"
    )


def _percent(change: float | None) -> str:
    return "an unknown share" if change is None else f"{100 * change:+.1f} %"
