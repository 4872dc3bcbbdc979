"""A lens on a page: how often its first choice is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from preimage.report.opened import Opened, Summary, flat
from preimage.report.page import Section
from preimage.report.parts import Column, Facts, Part, Table

if TYPE_CHECKING:
    from preimage.inversion.proposers.lens_files import LensInfo

_SHARES = ("rank0", "within8", "within64", "first")


def summary(opened: Opened) -> Summary:
    """For what a lens is, and how often its first choice is right."""
    lens: LensInfo = opened.result
    findings = [
        f"Held-out {kind}: {row['rank0']:.2%} of the tokens named first, {row['within8']:.2%} within 8."
        for kind, row in lens.ranks.items()
    ]
    return Summary(f"A lens for layer {lens.layer} ({lens.place}) of {lens.model}.", findings)


def sections(opened: Opened) -> list[Section]:
    """Held-out ranks, shape and training."""
    lens: LensInfo = opened.result
    rows = [
        [kind, *(f"{row[name]:.2%}" for name in _SHARES), f"{row['worst']:.0f}"]
        for kind, row in lens.ranks.items()
    ]  # fmt: skip
    names = ("named first", "within 8", "within 64", "first position named first", "worst rank")
    columns: list[str | Column] = ["held-out text", *(Column(name, numeric=True) for name in names)]
    shape = [(name, flat(value)) for name, value in lens.shape.to_dict().items()]
    return [
        Section(
            "How good it is", [Table(columns, rows, "Ranks of the true token on text the training never saw")]
        ),
        Section("Its shape", [Facts(shape)]),
    ]


def compare(runs: Sequence[Opened]) -> list[Part]:
    """Lenses side by side, by the share of tokens that they name first."""
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.result.ranks))
    rows = [
        [run.name, run.result.model, str(run.result.layer),
         *(f"{run.result.ranks[kind]['rank0']:.2%}" if kind in run.result.ranks else "" for kind in kinds)]
        for run in runs
    ]  # fmt: skip
    columns: list[str | Column] = [
        "lens",
        "model",
        Column("layer", numeric=True),
        *(Column(kind, numeric=True) for kind in kinds),
    ]
    return [Table(columns, rows, "Held-out tokens named first")]
