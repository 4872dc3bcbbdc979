"""Prompts, changed models and searches; every number of a spacing by brute force."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preimage
from preimage.collisions.result import CollidingPair, Spacing
from preimage.distances import norms, row_distances
from preimage.models import LanguageModel
from preimage.states import SAFETY
from support.tiny import build, random_ids, tiny

LENGTHS = (3, 9, 5, 9, 12, 1)
PROMPTS = [random_ids(LENGTHS[seed % len(LENGTHS)], seed) for seed in range(24)]
FAMILY = [[7] * 2, [7] * 3, [7] * 17]
BOS = 1


@functools.cache
def changed(name: str, change: Callable[[nn.Module], None]) -> LanguageModel:
    """A tiny model with other weights, changed before preimage sees it; shared between tests."""
    module = build(name)
    with torch.no_grad():
        change(module)
    return preimage.load(module)


@functools.cache
def with_twins(name: str, first: int = 5, second: int = 6) -> LanguageModel:
    def copy_row(module: nn.Module) -> None:
        table = module.get_input_embeddings().weight  # type: ignore[operator]
        table[second] = table[first]

    return changed(name, copy_row)


def flat(module: nn.Module) -> None:
    """Every state at "final" is 0: all prompts collide there, and nothing says why."""
    module.model.norm.weight.zero_()  # type: ignore[union-attr,operator]


def deaf(module: nn.Module) -> None:
    """No block adds anything: a state is its last token's embedding at every layer."""
    for block in module.model.layers:  # type: ignore[union-attr]
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()


def all_distances(states: Tensor) -> Tensor:
    """The definition: float64 differences of every two rows."""
    return row_distances(states[:, None], states[None])


def ends(pairs: Sequence[CollidingPair]) -> list[tuple[int, int]]:
    return [(pair.first, pair.second) for pair in pairs]


def check_spacing(
    spacing: Spacing,
    states: Tensor,
    structural: Callable[[int, int], bool],
    thresholds: Sequence[float],
    count: int = 10,
) -> None:
    """Every number of a spacing, by float64 differences of all pairs."""
    away, lengths, rows = all_distances(states), norms(states), range(len(states))
    pairs = sorted((float(away[i, j]), i, j) for i, j in combinations(rows, 2))
    distances = [distance for distance, _, _ in pairs]
    same = [[j for j in rows if torch.equal(states[i], states[j])] for i in rows]
    first_like = [min(j for j in same[i] if i == j or structural(i, j)) for i in rows]
    assert spacing.states == len(states)
    assert spacing.pairs == len(pairs) == len(states) * (len(states) - 1) // 2
    assert spacing.distinct == len({min(like) for like in same})
    assert (spacing.minimum.first, spacing.minimum.second) == pairs[0][1:]
    assert spacing.minimum.distance == pytest.approx(distances[0], rel=1e-12)
    apart = [
        pair
        for pair in pairs
        if not structural(*pair[1:]) and first_like[pair[1]] == pair[1] and first_like[pair[2]] == pair[2]
    ][:count]
    assert ends(spacing.closest) == [pair[1:] for pair in apart]
    assert [pair.distance for pair in spacing.closest] == pytest.approx([p[0] for p in apart], rel=1e-12)
    assert spacing.separation == spacing.closest[0].distance
    assert spacing.mean_norm == pytest.approx(float(lengths.mean()), rel=1e-12)
    assert spacing.normalised == pytest.approx(spacing.closest[0].distance / spacing.mean_norm, rel=1e-12)
    floor = {(i, j): SAFETY * spacing.noise_floor * float(max(lengths[i], lengths[j])) for _, i, j in pairs}
    assert spacing.floor == pytest.approx(SAFETY * spacing.noise_floor * spacing.mean_norm, rel=1e-12)
    for pair in (spacing.minimum, *spacing.closest, *spacing.listed):
        assert pair.floor == pytest.approx(floor[pair.first, pair.second], rel=1e-12)
    below = {f"{t:g}": sum(distance < t for distance in distances) for t in (1e-6, *thresholds)}
    assert spacing.below == below
    at_floor = [(i, j) for distance, i, j in pairs if distance <= floor[i, j]]
    assert spacing.at_floor == len(at_floor) == sum(spacing.explained.values()) + spacing.unexplained
    assert spacing.unexplained == sum(not structural(i, j) for i, j in at_floor)
    for q, (value, low, high) in spacing.quantiles.items():
        truth = distances[max(1, math.ceil(float(q) * len(distances))) - 1]
        assert low <= truth <= high
        assert low <= value <= high
        if truth > 0.1 * float(lengths.max()):
            assert high - low < 1e-2 * truth


GIVEN: dict[str, Any] = {"thresholds": (0.5,), "closest": 4, "hard_bases": 2}


class Stopped(Exception):  # noqa: N818  # a signal, not an error
    """Stands for a crash."""


def stop_at(note: str, number: int) -> Callable[[int, int, str], None]:
    """Progress that ends the run at the n-th report that begins so."""
    seen = 0

    def progress(done: int, total: int, said: str) -> None:
        nonlocal seen
        seen += said.startswith(note)
        if seen == number and said.startswith(note):
            raise Stopped

    return progress


def results_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".jsonl")}


def lines(folder: Path) -> int:
    """Finished items in a run folder."""
    items = folder / "items.jsonl"
    return items.read_bytes().count(b"\n") if items.exists() else 0


def search(out: Path, **changes: Any) -> preimage.CollisionAudit:
    given: dict[str, Any] = {"model": tiny("llama"), "prompts": PROMPTS, "layers": "all"} | GIVEN | changes
    return preimage.find_collisions(out=out, **given)


PREFIXES = [[3], random_ids(6, 1), [7] * 5]
