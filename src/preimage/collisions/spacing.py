"""All pairs of a set of states: the closest, how distances are distributed, and which are noise alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import merge
from itertools import combinations, islice, product

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions.options import PUBLISHED, CollisionOptions
from preimage.collisions.result import ComparedPair, Spacing
from preimage.collisions.structure import UNEXPLAINED
from preimage.distances import (
    EachTile,
    Pair,
    PairScan,
    count_below,
    distance_distribution,
    find_closest,
    here,
    norms,
)
from preimage.errors import OptionError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.states import capture, noise_floor, safety

_QUANTILES = (0.01, 0.5, 1.0)
_SAMPLE = 8  # prompts that tell how long states are


@dataclass(frozen=True)
class RowLabels:
    """What the rows of a set of states stand for."""

    ids: Callable[[int], tuple[int, ...]]
    text: Callable[[int], str | None]
    key: Callable[[int], Hashable]  # rows with equal keys have the same state for structural reasons
    explain: Callable[[int, int, bool], str]  # two rows, and whether their states are the same but for noise


def require_above_noise(
    model: LanguageModel, ids: Sequence[tuple[int, ...]], layers: Sequence[Layer], thresholds: Sequence[float]
) -> None:
    """Refuse a threshold under the noise floor of a layer, before any other work is done."""
    if not thresholds:
        return
    lowest, floor = min(thresholds), noise_floor(model, layers)
    sample = capture(model, ids[:_SAMPLE], layers, positions="last")
    for layer in layers:
        noise = 2 * floor[layer] * float(norms(sample.last(layer)).median())
        if lowest < noise:
            raise OptionError(
                f"The threshold {lowest:g} is below the noise floor of layer {layer}, {noise:.2g}.",
                "Give a larger one, or leave this layer out.",
            )


def measure_spacing(
    states: Float[Tensor, "row d"],
    noise_floor: float,
    labels: RowLabels,
    options: CollisionOptions,
    each: EachTile = here,
) -> Spacing:
    """Everything about the pairs of these states; ``noise_floor`` is relative, ``each`` runs the tiles.

    Two states are the same but for noise when they are no farther apart than ``safety`` floors of the longer:
    the line that inversion draws too.
    """
    labels = replace(labels, key=cache(labels.key))
    scan = PairScan(states, counting=True, each=each)
    lengths = norms(states)
    factor = safety(states.dtype)
    radii = factor * noise_floor * lengths

    def compared(pair: Pair) -> ComparedPair:
        first, second, distance = pair
        radius = float(torch.maximum(radii[first], radii[second]))
        ids = labels.ids(first), labels.ids(second)
        texts = labels.text(first), labels.text(second)
        reason = labels.explain(first, second, distance <= radius)
        return ComparedPair(first, second, *ids, *texts, distance, radius, reason)

    distances = distance_distribution(scan)
    thresholds = sorted({PUBLISHED, *options.thresholds})
    counts = count_below(scan, thresholds)
    reasons, listed = _within_noise(scan, radii, labels, options.closest)
    closest = tuple(map(compared, _must_differ(scan, labels, options.closest)))
    mean_norm, margin = float(lengths.mean()), closest[0].distance if closest else None
    return Spacing(
        states=len(states),
        pairs=scan.pairs,
        distinct=len(scan.rows.firsts),
        closest_pair=compared(find_closest(scan)[0]),
        closest=closest,
        margin=margin,
        normalised_margin=None if margin is None or mean_norm == 0 else margin / mean_norm,
        quantiles={f"{q:g}": (*distances.quantile(q),) for q in _QUANTILES},
        mean_norm=mean_norm,
        noise_floor=noise_floor,
        noise_radius=factor * noise_floor * mean_norm,
        below={f"{threshold:g}": count for threshold, count in zip(thresholds, counts, strict=True)},
        within_noise=sum(reasons.values()),
        explained={reason: count for reason, count in sorted(reasons.items()) if reason != UNEXPLAINED},
        unexplained=reasons[UNEXPLAINED],
        listed=tuple(map(compared, listed)),
    )


def _must_differ(scan: PairScan, labels: RowLabels, count: int) -> list[Pair]:
    """The closest pairs that no structure makes the same, those of equal states (distance 0) first.

    Of rows with equal keys and equal states only the first is named.
    """
    at_zero = merge(*(_other_keys(group, group, 0.0, labels) for group in scan.rows.groups()))
    equal = list(islice(at_zero, count))
    asked = 2 * count
    while True:  # more and more pairs of distinct states, until enough of them have different keys
        distinct = find_closest(scan, asked, equal=False)
        apart = [
            pair
            for first, second, distance in distinct
            for pair in _other_keys(scan.rows.group(first), scan.rows.group(second), distance, labels)
        ]
        if len(equal) + len(apart) >= count or len(distinct) < asked:
            return (equal + sorted(apart, key=lambda pair: (pair.distance, pair)))[:count]
        asked *= 8


def _other_keys(
    one: Sequence[int], other: Sequence[int], distance: float, labels: RowLabels
) -> Iterator[Pair]:
    """Pairs from two groups of rows, as far apart as is given, whose keys differ."""
    for _, first, second in _classes(one, other, labels):
        if labels.key(first) != labels.key(second):
            yield Pair(min(first, second), max(first, second), distance)


def _within_noise(
    scan: PairScan, radii: Float[Tensor, " row"], labels: RowLabels, count: int
) -> tuple[Counter[str], list[Pair]]:
    """Pairs within their noise radius, counted by what explains them, and the first of each reason."""
    reasons: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    listed: list[Pair] = []

    def note(one: Sequence[int], other: Sequence[int], distance: float) -> None:
        for number, first, second in _classes(one, other, labels):
            reason = labels.explain(first, second, True)
            reasons[reason] += number
            if shown[reason] < count:
                shown[reason] += 1
                listed.append(Pair(min(first, second), max(first, second), distance))

    for group in scan.rows.groups():
        note(group, group, 0.0)
    for firsts, seconds, away in scan.pairs_within(float(radii.max())):
        near = away <= torch.maximum(radii[firsts], radii[seconds])
        columns = (column[near].tolist() for column in (firsts, seconds, away))
        for first, second, distance in zip(*columns, strict=True):
            note(scan.rows.group(first), scan.rows.group(second), distance)
    return reasons, listed


def _classes(one: Sequence[int], other: Sequence[int], labels: RowLabels) -> Iterator[tuple[int, int, int]]:
    """(how many pairs, an example) for every two classes of equal keys in two groups, or in one twice."""
    left = _by_key(one, labels)
    if one is other:
        for members in left:
            if len(members) > 1:
                yield len(members) * (len(members) - 1) // 2, members[0], members[1]
    for a, b in combinations(left, 2) if one is other else product(left, _by_key(other, labels)):
        yield len(a) * len(b), a[0], b[0]


def _by_key(rows: Sequence[int], labels: RowLabels) -> list[list[int]]:
    classes: dict[Hashable, list[int]] = {}
    for row in rows:
        classes.setdefault(labels.key(row), []).append(row)
    return list(classes.values())
