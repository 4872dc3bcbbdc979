"""Inversions on a page: prompts as text, how sure each token is, how far off others were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from preimage.figures.margins import distance_figure, margin_figure
from preimage.figures.style import named
from preimage.inversion.result import Inversion, Position
from preimage.report.opened import Opened, Summary
from preimage.report.page import Section
from preimage.report.parts import (
    Bullets,
    Cell,
    Column,
    Details,
    Figure,
    Heading,
    Paragraph,
    Part,
    Table,
    Token,
    Tokens,
    Tone,
)
from preimage.report.spelling import Speller

_TOKENS = 4000  # on a page, one by one; of prompts beyond, the text alone
_FIGURES = 3  # prompts whose distances are drawn
_NUMBERED = 2000  # positions told in numbers
_ROWS = 2500  # prompts in the table
_BRIEF = 200  # letters of a prompt in it
_LISTED = 10  # alternatives of a prompt that are spelled
_PART = "·"  # stands for a token that is a part of the character behind it
_TONES: dict[str, Tone] = {
    "recovered": "good", "likely": "warn", "ambiguous": "warn", "not_recovered": "bad"
}  # fmt: skip


def summary(opened: Opened) -> Summary:
    """What was recovered, and what that rests on."""
    results: Sequence[Inversion] = opened.result
    count, statuses = len(results), Counter[str](one.status for one in results)
    whole = statuses["recovered"]
    headline = f"{whole} of {count} {'prompt' if count == 1 else 'prompts'} recovered exactly"
    others = [f"{statuses[name]} {said}" for name, said in (
        ("likely", "read as likely"), ("ambiguous", "ambiguous"), ("not_recovered", "not recovered"),
    ) if statuses[name]]  # fmt: skip
    tone: Tone = "good" if whole == count else "warn"
    return Summary(f"{', '.join([headline, *others])}.", list(_findings(results)), tone)


def _findings(results: Sequence[Inversion]) -> list[str]:
    if not results:
        return ["There was no prompt."]
    first = results[0]
    layers = ", ".join(dict.fromkeys(str(one.layer) for one in results))
    methods = ", ".join(dict.fromkeys(f"{one.method} ({one.proposer or 'no proposer'})" for one in results))
    tokens = sum(len(one.reading.token_ids) for one in results)
    passes = sum(one.forward_tokens for one in results) / max(1, tokens)
    said = [
        f"From the states of layer {layers} ({first.observe}), by the method {methods}.",
        f"{tokens:,} tokens were read, at the cost of {passes:.3g} forward passes over each, in "
        f"{sum(one.seconds for one in results):.3g} s and {first.setup_seconds:.3g} s to get ready.",
        f"The noise of this model at this layer is {first.noise_floor:.2g} of a state's length; what is "
        "accepted as the same state is measured by it.",
    ]
    near = [room for one in results if (room := _room(one)) is not None]
    if near:
        said.append(
            f"The nearest other token that was tried is at least {min(near):.3g} times as far off as what is "
            "accepted."
        )
    sure = Counter(one.unique for one in results if one.status == "recovered" and one.unique)
    words = {"proved": "the whole vocabulary was tried at every position",
             "tested": "the tokens most alike were tried, and all lie far apart"}  # fmt: skip
    said += [f"{number} without a rival, {how}: {words[how]}." for how, number in sure.items()]
    return said


def _room(result: Inversion) -> float | None:
    """How many times what is accepted the nearest other token is off, at its nearest."""
    ratios = [
        (p.margin if p.margin is not None else p.runner_up_distance or 0.0) / p.radius
        for p in result.positions
        if p.radius and (p.margin is not None or p.runner_up_distance is not None)
    ]
    return min(ratios, default=None)


def sections(opened: Opened) -> list[Section]:
    """The prompts, their distances, and the table of all."""
    results: Sequence[Inversion] = opened.result
    speller = Speller(opened.models[0] if opened.models else None)
    texts: list[Part] = []
    numbered = left = 0
    shown = 0
    for index, one in enumerate(results):
        left += len(one.reading.token_ids)
        if left > _TOKENS and shown:
            break
        texts += _prompt(index, one, speller, numbered < _NUMBERED)
        numbered += len(one.positions)
        shown += 1
    if shown < len(results):
        texts.append(Paragraph(f"{len(results) - shown:,} more are in the table of all prompts."))
    found = [Section("The prompts as they were read", texts or [Paragraph("There was none.")])]
    drawn = [part for part in map(_figure, range(len(results)), islice(results, _FIGURES),
                                  [speller] * _FIGURES, [opened.about] * _FIGURES) if part]  # fmt: skip
    if drawn:
        found.append(Section("How far off other tokens are", drawn))
    if len(results) > 1:
        found.append(Section("All prompts", [_table(results)]))
    return found


def compare(runs: Sequence[Opened]) -> list[Part]:
    """Runs side by side, one row each."""
    rows: list[list[str | Cell]] = []
    for run in runs:
        results: Sequence[Inversion] = run.result
        statuses = Counter[str](one.status for one in results)
        tokens = sum(len(one.reading.token_ids) for one in results)
        layers = ", ".join(dict.fromkeys(str(one.layer) for one in results))
        rows.append([
            run.name, layers, ", ".join(dict.fromkeys(one.method for one in results)), str(len(results)),
            *(str(statuses[name]) for name in _TONES),
            f"{sum(one.forward_tokens for one in results) / max(1, tokens):.3g}",
            f"{sum(one.seconds for one in results):.3g}",
        ])  # fmt: skip
    heads = ["layer", "method"]
    numbers = ["prompts", *(name.replace("_", " ") for name in _TONES), "passes a token", "seconds"]
    return [Table(["run", *heads, *(Column(name, numeric=True) for name in numbers)], rows, "Inversions")]


def _prompt(index: int, one: Inversion, speller: Speller, numbers: bool) -> list[Part]:
    """One prompt: its tokens, why it is believed or not, other prompts that fit, its positions in numbers."""
    ids = one.reading.token_ids
    pieces = speller.pieces(ids, one.reading.text)
    at = {position.index: position for position in one.positions}
    tokens = [
        Token(piece or _PART, sure, _told(at.get(number), speller))
        for number, (piece, sure) in enumerate(zip(pieces, one.reading.confidence, strict=False))
    ]
    status = one.status.replace("_", " ")
    label = f"Prompt {index}: {status}, {len(ids)} tokens, layer {one.layer}, {one.seconds:.3g} s"
    parts: list[Part] = [Tokens(tokens, label)]
    said = one.reason or one.uniqueness
    if said:
        parts.append(Paragraph(said))
    if one.status == "ambiguous":
        more = "" if one.complete else " or more"
        parts.append(Heading(f"{one.fitting}{more} prompts fit the states of prompt {index}"))
        parts.append(Bullets(["".join(speller.pieces(other)) for other in one.alternatives[:_LISTED]]))
    if numbers and one.positions:
        parts.append(Details(f"Prompt {index}, position by position", [_positions(one, pieces, speller)]))
    return parts


def _told(position: Position | None, speller: Speller) -> str:
    """What is shown of a token that is pointed at, beside how sure it is."""
    if position is None:
        return ""
    if position.margin is not None:
        return f"margin D {position.margin:.4g}, noise up to {position.tolerated_noise:.4g} tolerated"
    if position.runner_up_distance is None:
        return f"off by {position.distance:.3g}, {position.radius:.3g} accepted"
    rival = speller.one(position.runner_up_id) if position.runner_up_id is not None else "another"
    return (
        f"off by {position.distance:.3g}, {position.radius:.3g} accepted; nearest other tried {rival!r}, "
        f"{position.runner_up_distance:.4g}"
    )


def _positions(one: Inversion, pieces: Sequence[str], speller: Speller) -> Table:
    proved = any(position.margin is not None for position in one.positions)
    rows: list[list[str | Cell]] = []
    for p in one.positions:
        away = p.margin if proved else p.runner_up_distance
        sure = one.reading.confidence[p.index] if p.index < len(one.reading.confidence) else None
        rows.append([
            str(p.index), pieces[p.index] if p.index < len(pieces) else speller.one(p.token_id),
            str(p.token_id), "" if sure is None else f"{sure:.3g}",
            Cell(f"{p.distance:.3g}", "plain" if p.accepted else "bad"), f"{p.radius:.3g}",
            "" if away is None else f"{away:.4g}",
            "" if p.runner_up_id is None else speller.one(p.runner_up_id), str(p.tests),
        ])  # fmt: skip
    other = "margin D" if proved else "nearest other tried"
    names = ("id", "confidence", "off by", "accepted", other)
    columns: list[str | Column] = [Column("position", numeric=True), "token"]
    columns += [*(Column(name, numeric=True) for name in names), "which", Column("tests", numeric=True)]
    return Table(columns, rows, "Distances are in units of a state.", row_headers=False)


def _figure(index: int, one: Inversion, speller: Speller, about: str) -> Figure | None:
    if not one.positions:
        return None
    proved = any(position.margin is not None for position in one.positions)
    figure = (margin_figure if proved else distance_figure)(one, speller.one)
    figure.update_layout(title={"text": f"Prompt {index}: {figure.layout.title.text}"})
    room = _room(one)
    words = f"Prompt {index}: distances by position. "
    if room is not None:
        words += f"Other tokens stay at least {room:.3g} times as far off as what is accepted."
    return Figure(named(figure, about), words)


def _table(results: Sequence[Inversion]) -> Table:
    rows: list[list[str | Cell]] = []
    for index, one in enumerate(results[:_ROWS]):
        text = one.reading.text
        shown = text if text is not None else " ".join(map(str, one.reading.token_ids))
        least = min(one.reading.confidence, default=None)
        rows.append([
            str(index), Cell(one.status.replace("_", " "), _TONES[one.status]),
            shown if len(shown) <= _BRIEF else f"{shown[:_BRIEF]} […]", str(len(one.reading.token_ids)),
            "" if least is None else f"{least:.3g}", "" if one.margin is None else f"{one.margin:.3g}",
            str(one.tests), f"{one.seconds:.2g}",
        ])  # fmt: skip
    rest = len(results) - len(rows)
    caption = "Margin: the nearest other token that was tried, over all positions."
    if rest:
        caption += f" {rest:,} more prompts are in the run folder alone."
    names = ("tokens", "least sure", "margin", "tests", "seconds")
    columns: list[str | Column] = [
        "prompt",
        "status",
        "text",
        *(Column(name, numeric=True) for name in names),
    ]
    return Table(columns, rows, caption)
