"""All pairs of a set of states: the closest, the spread, and what lies at or under the noise floor."""

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
from preimage.collisions.result import CollidingPair, Spacing
from preimage.collisions.structure import UNEXPLAINED
from preimage.distances import (
    EachTile,
    PairScan,
    count_below,
    distance_distribution,
    find_closest,
    here,
    norms,
)
from preimage.states import safety

_QUANTILES = (0.01, 0.5, 1.0)


@dataclass(frozen=True)
class Named:
    """What the rows of a set of states stand for."""

    ids: Callable[[int], tuple[int, ...]]
    text: Callable[[int], str | None]
    key: Callable[[int], Hashable]  # rows with equal keys have the same state for structural reasons
    explain: Callable[[int, int, bool], str]  # two rows, and whether their states are the same but for noise


def measure_spacing(
    states: Float[Tensor, "row d"],
    noise_floor: float,
    named: Named,
    options: CollisionOptions,
    each: EachTile = here,
) -> Spacing:
    """Everything about the pairs of these states; ``noise_floor`` is relative, ``each`` runs the tiles.

    Two states are the same but for noise when they are no farther apart than ``safety`` floors of the longer:
    the line that inversion draws too.
    """
    named = replace(named, key=cache(named.key))
    scan = PairScan(states, counting=True, each=each)
    lengths = norms(states)
    factor = safety(states.dtype)
    floors = factor * noise_floor * lengths

    def pair(first: int, second: int, distance: float) -> CollidingPair:
        floor = float(torch.maximum(floors[first], floors[second]))
        return CollidingPair(
            first=first,
            second=second,
            first_ids=named.ids(first),
            second_ids=named.ids(second),
            first_text=named.text(first),
            second_text=named.text(second),
            distance=distance,
            floor=floor,
            explanation=named.explain(first, second, distance <= floor),
        )

    distances = distance_distribution(scan)
    thresholds = sorted({PUBLISHED, *options.thresholds})
    counts = count_below(scan, thresholds)
    reasons, listed = _at_floor(scan, floors, named, options.closest)
    closest = [pair(*found) for found in _must_differ(scan, named, options.closest)]
    mean_norm, separation = float(lengths.mean()), closest[0].distance if closest else None
    return Spacing(
        states=len(states),
        pairs=scan.pairs,
        distinct=len(scan.rows.firsts),
        minimum=pair(*find_closest(scan)[0]),
        closest=tuple(closest),
        separation=separation,
        normalised=None if separation is None or mean_norm == 0 else separation / mean_norm,
        quantiles={f"{q:g}": (*distances.quantile(q),) for q in _QUANTILES},
        mean_norm=mean_norm,
        noise_floor=noise_floor,
        floor=factor * noise_floor * mean_norm,
        below={f"{threshold:g}": count for threshold, count in zip(thresholds, counts, strict=True)},
        at_floor=sum(reasons.values()),
        explained={reason: count for reason, count in sorted(reasons.items()) if reason != UNEXPLAINED},
        unexplained=reasons[UNEXPLAINED],
        listed=tuple(pair(*found) for found in listed),
    )


def _must_differ(scan: PairScan, named: Named, count: int) -> list[tuple[int, int, float]]:
    """The closest pairs that no structure makes the same, also where their states are equal to the bit.

    Of rows with equal keys and equal states only the first is named.
    """

    def apart(one: Sequence[int], other: Sequence[int], distance: float) -> Iterator[tuple[int, int, float]]:
        for _, first, second in _classes(one, other, named):
            if named.key(first) != named.key(second):
                yield min(first, second), max(first, second), distance

    equal = list(islice(merge(*(apart(group, group, 0.0) for group in scan.rows.groups())), count))
    wanted = 2 * count
    while True:
        found = find_closest(scan, wanted, equal=False)
        others = (
            pair
            for first, second, distance in found
            for pair in apart(scan.rows.group(first), scan.rows.group(second), distance)
        )
        pairs = equal + sorted(others, key=lambda pair: (pair[2], pair))
        if len(pairs) >= count or len(found) < wanted:
            return pairs[:count]
        wanted *= 8


def _at_floor(
    scan: PairScan, floors: Float[Tensor, " row"], named: Named, count: int
) -> tuple[Counter[str], list[tuple[int, int, float]]]:
    """Pairs at or under their floor, counted by what explains them, and the first of each reason."""
    reasons: Counter[str] = Counter()
    listed: list[tuple[int, int, float]] = []
    shown: Counter[str] = Counter()

    def note(reason: str, number: int, example: tuple[int, int, float]) -> None:
        reasons[reason] += number
        if number and shown[reason] < count:
            shown[reason] += 1
            listed.append(example)

    for group in scan.rows.groups():
        for number, first, second in _classes(group, group, named):
            note(named.explain(first, second, True), number, (first, second, 0.0))
    for firsts, seconds, away in scan.pairs_within(float(floors.max())):
        near = away <= torch.maximum(floors[firsts], floors[seconds])
        for i, j, distance in zip(
            firsts[near].tolist(), seconds[near].tolist(), away[near].tolist(), strict=True
        ):
            for number, first, second in _classes(scan.rows.group(i), scan.rows.group(j), named):
                note(
                    named.explain(first, second, True),
                    number,
                    (min(first, second), max(first, second), distance),
                )
    return reasons, listed


def _classes(one: Sequence[int], other: Sequence[int], named: Named) -> Iterator[tuple[int, int, int]]:
    """(how many pairs, an example) for every two classes of equal keys in two groups, or in one twice."""
    left, right = _by_key(one, named), _by_key(other, named)
    if one is other:
        for members in left:
            if len(members) > 1:
                yield len(members) * (len(members) - 1) // 2, members[0], members[1]
        for a, b in combinations(left, 2):
            yield len(a) * len(b), a[0], b[0]
    else:
        for a, b in product(left, right):
            yield len(a) * len(b), a[0], b[0]


def _by_key(rows: Sequence[int], named: Named) -> list[list[int]]:
    classes: dict[Hashable, list[int]] = {}
    for row in rows:
        classes.setdefault(named.key(row), []).append(row)
    return list(classes.values())
