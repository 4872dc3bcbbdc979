"""Searches for collisions on a page: distances by layer, near-collisions, the closest pairs compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from preimage.collisions.result import CollisionAudit, ComparedPair, LayerCollisions, Spacing
from preimage.figures.spacing import margins_figure, near_pairs_figure, spacing_figure
from preimage.figures.style import named
from preimage.report.opened import Opened, Summary, made_together
from preimage.report.page import Section
from preimage.report.parts import (
    Cell,
    Column,
    Details,
    Difference,
    Figure,
    Heading,
    Paragraph,
    Part,
    Table,
    Tone,
)
from preimage.report.spelling import Speller, words

_PAIRS = 10  # that are compared of a layer
_CURVES = 12  # runs in one figure
_UNEXPLAINED = 50  # pairs that are shown


def summary(opened: Opened) -> Summary:
    """Whether two prompts came to share a state, and how near the nearest are."""
    audit: CollisionAudit = opened.result
    pairs = audit.layers[0].spacing.pairs
    where = f"{audit.prompts:,} prompts, {pairs:,} pairs at each of {len(audit.layers)} layers"
    if audit.unexplained:
        headline = f"{audit.unexplained:,} collisions that nothing explains, among {where}."
        return Summary(headline, list(_findings(audit)), "bad")
    headline = f"No collision that the model's structure does not explain: {where}, all compared."
    return Summary(headline, list(_findings(audit)), "good")


def _findings(audit: CollisionAudit) -> Iterable[str]:
    margins = [(one.spacing.margin, one) for one in audit.layers if one.spacing.margin is not None]
    if margins:
        margin, layer = min(margins, key=lambda pair: pair[0])
        spacing = layer.spacing
        yield (
            f"The two states nearest to one another that must differ are {margin:.4g} apart, at layer "
            f"{layer.layer}. There noise may put {spacing.noise_radius:.2g} between equal ones, and a state "
            f"is {spacing.mean_norm:.3g} long on average."
        )
    deepest = audit.layers[-1]
    if deepest.spacing.margin is not None:
        times = deepest.spacing.margin / deepest.spacing.noise_radius if deepest.spacing.noise_radius else 0
        yield (
            f"At the deepest layer ({deepest.layer}) the nearest two are {deepest.spacing.margin:.4g} apart"
            + (f", {times:,.0f} times what noise may do." if times else ".")
        )
    explained: Counter[str] = Counter()
    for one in audit.layers:
        explained.update(one.spacing.explained)
    for reason, number in explained.items():
        yield f"{number:,} pairs are within noise because of the model's structure: {reason}."
    hard = sum(kind.pairs for one in audit.layers[-1:] for kind in one.hard)
    if hard:
        yield f"Beside them {hard:,} pairs a layer that were made to be hard to tell apart."
    if audit.duplicates_removed:
        yield f"{audit.duplicates_removed:,} prompts that were given twice counted once."


def sections(opened: Opened) -> list[Section]:
    """Curves, maps, tables and pairs."""
    audit: CollisionAudit = opened.result
    speller = Speller(audit.model)
    deepest = audit.layers[-1]
    found = [
        Section("Distances by layer", [_curves(audit, opened.about), _table(audit.layers)]),
        Section("Near-collisions", [_map(audit, opened.about)]),
        Section("The closest pairs", _closest(audit, speller)),
    ]
    strange = [
        pair for one in audit.layers for pair in one.spacing.listed if pair.explanation == "unexplained"
    ]
    if strange:
        parts: list[Part] = [difference(pair, speller) for pair in strange[:_UNEXPLAINED]]
        if len(strange) > _UNEXPLAINED:
            parts.append(Paragraph(f"{len(strange) - _UNEXPLAINED:,} more are in the run folder alone."))
        found.insert(0, Section("Pairs that nothing explains", parts))
    if deepest.hard:
        found.append(Section("Pairs made to be hard", [_hard(deepest, speller)]))
    return found


def compare(runs: Sequence[Opened]) -> list[Part]:
    """The closest pairs of several searches by layer, and what each found."""
    audits = {run.name: run.result for run in runs[:_CURVES]}
    rows: list[list[str | Cell]] = []
    for run in runs:
        audit: CollisionAudit = run.result
        margins = [
            (one.spacing.margin, str(one.layer)) for one in audit.layers if one.spacing.margin is not None
        ]
        least = min(margins, default=(None, ""))
        rows.append([
            run.name, run.about, f"{audit.prompts:,}", f"{audit.layers[0].spacing.pairs:,}",
            "" if least[0] is None else f"{least[0]:.4g}", least[1], _unexplained(audit.unexplained),
        ])  # fmt: skip
    counts = {audit.prompts for audit in audits.values()}
    note = (
        "" if len(counts) == 1 else "Nearest distances shrink with the number of prompts: these differ in it."
    )
    names = ("prompts", "pairs a layer", "closest that must differ", "at layer", "unexplained")
    table = Table(
        ["run", "by", *(Column(name, numeric=True) for name in names)], rows, "Searches for collisions"
    )
    figure = named(margins_figure(audits), made_together(runs))
    return [table, Figure(figure, f"The closest pair by layer. {_in_words(audits)}", note)]


def _in_words(audits: dict[str, CollisionAudit]) -> str:
    return " ".join(f"{name}: {_range(audit.layers)}" for name, audit in audits.items())


def _range(layers: Sequence[LayerCollisions]) -> str:
    margins = [one.spacing.margin for one in layers if one.spacing.margin is not None]
    return f"from {min(margins):.3g} to {max(margins):.3g}." if margins else "no pair must differ."


def _curves(audit: CollisionAudit, about: str) -> Figure:
    words_ = f"Distances by layer. The closest pair that must differ: {_range(audit.layers)}"
    return Figure(named(spacing_figure(audit), about), words_, "Quantiles are of the distances of all pairs.")


def _map(audit: CollisionAudit, about: str) -> Figure | Paragraph:
    """The map, or a sentence where it would be blank."""
    spacings = [one.spacing for one in audit.layers]
    if not any(one.within_noise or any(one.below.values()) or one.distinct < one.states for one in spacings):
        least = ", ".join(spacings[0].below)
        return Paragraph(f"None: at no layer are two states within noise, or nearer than any of {least}.")
    near = sum(one.spacing.within_noise for one in audit.layers)
    words_ = f"Pairs nearer than each threshold, by layer. Within noise: {near:,} over all layers, "
    words_ += f"{audit.unexplained:,} of them unexplained."
    return Figure(named(near_pairs_figure(audit), about), words_)


def spacing_row(head: str, spacing: Spacing) -> list[str | Cell]:
    """One row of a table of spacings."""
    margin = "none" if spacing.margin is None else f"{spacing.margin:.4g}"
    relative = "" if spacing.normalised_margin is None else f"{spacing.normalised_margin:.3g}"
    quantiles = [f"{values[0]:.4g}" for values in spacing.quantiles.values()]
    below = [f"{number:,}" for number in spacing.below.values()]
    return [
        head, margin, relative, *quantiles, f"{spacing.mean_norm:.3g}", f"{spacing.noise_radius:.2g}", *below,
        f"{spacing.within_noise:,}", _unexplained(spacing.unexplained),
    ]  # fmt: skip


def spacing_columns(head: str, spacing: Spacing) -> list[str | Column]:
    """The columns of these rows."""
    names = [
        "closest that must differ", "/ mean length",
        *("maximum" if q == "1" else f"quantile {q}" for q in spacing.quantiles), "mean length",
        "noise radius",
        *(f"below {threshold}" for threshold in spacing.below), "within noise", "unexplained",
    ]  # fmt: skip
    return [head, *(Column(name, numeric=True) for name in names)]


def _table(layers: Sequence[LayerCollisions]) -> Details:
    first = layers[0].spacing
    rows: list[list[str | Cell]] = [spacing_row(str(one.layer), one.spacing) for one in layers]
    caption = f"Every layer: {first.pairs:,} pairs of {first.states:,} states"
    return Details("The same in numbers", [Table(spacing_columns("layer", first), rows, caption)])


def _unexplained(number: int) -> Cell:
    tone: Tone = "bad" if number else "plain"
    return Cell(f"{number:,}", tone)


def difference(pair: ComparedPair, speller: Speller, where: str = "") -> Difference:
    """Two prompts, their tokens compared."""
    said = f"{pair.distance:.4g} apart (noise: {pair.noise_radius:.2g})"
    label = f"{where}prompts {pair.first} and {pair.second}, {said}"
    if pair.explanation:
        label += f"; {pair.explanation}"
    spelled = speller.knows(pair.first_ids, pair.first_text) and speller.knows(
        pair.second_ids, pair.second_text
    )
    if not spelled and pair.first_text is not None and pair.second_text is not None:
        return Difference(words(pair.first_text), words(pair.second_text), label)
    first, second = (
        speller.pieces(pair.first_ids, pair.first_text),
        speller.pieces(pair.second_ids, pair.second_text),
    )
    return Difference(first, second, label)


def _closest(audit: CollisionAudit, speller: Speller) -> list[Part]:
    deepest = audit.layers[-1]
    parts: list[Part] = [Heading(f"At the deepest layer, {deepest.layer}")]
    parts += [difference(pair, speller) for pair in deepest.spacing.closest[:_PAIRS]]
    if not deepest.spacing.closest:
        parts.append(Paragraph("No two prompts must differ there."))
    others: list[Part] = [
        difference(one.spacing.closest[0], speller, f"Layer {one.layer}: ")
        for one in audit.layers[:-1]
        if one.spacing.closest
    ]
    return [*parts, Details("The closest pair of every other layer", others)] if others else parts


def _hard(deepest: LayerCollisions, speller: Speller) -> Table:
    rows: list[list[str | Cell]] = [
        [
            kind.kind, f"{kind.pairs:,}", f"{kind.closest_pair.distance:.4g}",
            "none" if kind.margin is None else f"{kind.margin:.4g}", f"{kind.closest_pair.noise_radius:.2g}",
            f"{kind.within_noise:,}", ", ".join(f"{n} {why}" for why, n in kind.explained.items()) or "none",
            _unexplained(kind.unexplained),
        ]
        for kind in deepest.hard
    ]  # fmt: skip
    names = ("pairs", "closest", "closest that must differ", "noise radius", "within noise")
    columns: list[str | Column] = ["how they were made", *(Column(name, numeric=True) for name in names)]
    columns += ["explained", Column("unexplained", numeric=True)]
    return Table(columns, rows, f"Pairs that differ in as little as a prompt can, at layer {deepest.layer}")
