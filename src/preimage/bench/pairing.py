"""Certified distances of all pairs against the bare matrix products inside them."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.bench.timing import hardware, seconds
from preimage.devices import by_device
from preimage.distances import PairScan, find_closest, row_distances
from preimage.distances.arithmetic import FLOAT32, TF32, Arithmetic
from preimage.distances.screen import TILE
from preimage.errors import OptionError
from preimage.models.loading import parse_device
from preimage.progress import Progress, silent

_PLANTED = 1e-2  # distance of the planted pair


def bench_pairs(
    n: int = 20_000,
    d: int = 576,
    *,
    sets: int = 1,
    rounds: int = 5,
    norm: float = 3000.0,
    device: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The certified minimum and every row's nearest neighbour, beside the products alone.

    ``fraction_of_matmul``: seconds of the products of the same upper-triangle tiles, with nothing done to
    them, over ours, which take turns; the median of the rounds. On a CPU the products are float32's, on a
    GPU TF32's. The rows are random, their norms about ``norm``, those of every other set with a shared offset
    as long; each set has one planted pair, 0.01 apart, and ``planted`` says how many were found and right.
    """
    if n < 3 or d < 1 or rounds < 1 or sets < 1:
        given = f"n = {n}, d = {d}, sets = {sets}, rounds = {rounds}."
        raise OptionError(given, "Give n >= 3 and at least 1 of the others.")
    on = parse_device(device)
    arithmetic = TF32 if on.type == "cuda" else FLOAT32
    find_closest(PairScan(_rows(min(n, 2048), d, norm, seed, False, on)))  # warm
    ours, bare, planted, chosen = [0.0] * rounds, [0.0] * rounds, 0, set()
    for number in range(sets):
        x = _rows(n, d, norm, seed + number, number % 2 == 1, on)
        true = float(row_distances(x[0], x[n - 1]))
        for turn in range(rounds):
            progress(number * rounds + turn, sets * rounds, "rounds")
            bare[turn] += seconds(partial(_bare_products, x, arithmetic), on)
            scans: list[PairScan] = []
            ours[turn] += seconds(partial(_certify, x, scans), on)
        planted += find_closest(scans[0]) == [(0, n - 1, true)]
        chosen.add(scans[0].arithmetic)
    took, pairs = statistics.median(ours), sets * (n * (n - 1) // 2)
    return {
        "fraction_of_matmul": statistics.median(b / o for b, o in zip(bare, ours, strict=True)),
        "pairs_per_second": pairs / took,
        "pairs": pairs,
        "n": n,
        "d": d,
        "sets": sets,
        "norm": norm,
        "seconds": took,
        "product_seconds": statistics.median(bare),
        "product_arithmetic": arithmetic.name,
        "screen_arithmetic": sorted(chosen),
        "planted": {"sets": sets, "found": planted, "distance": _PLANTED},
        "hardware": hardware(on),
    }


def _bare_products(x: Float[Tensor, "row d"], arithmetic: Arithmetic) -> None:
    """The products a screen makes, and nothing else: what certified distances are measured against."""
    tile = by_device(TILE, x.device)
    parts = x.to(arithmetic.storage).split(tile)
    buffer = torch.empty(min(tile, len(x)) ** 2, dtype=arithmetic.sums, device=x.device)
    for number, left in enumerate(parts):
        for right in parts[number:]:
            arithmetic.product(left, right, buffer[: len(left) * len(right)].view(len(left), len(right)))


def _certify(x: torch.Tensor, kept: list[PairScan]) -> None:
    scan = PairScan(x)
    find_closest(scan)  # finds every row's nearest neighbour on the way
    kept.append(scan)


def _rows(n: int, d: int, norm: float, seed: int, offset: bool, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x: torch.Tensor = torch.randn(n, d, generator=generator, device=device) * (norm / d**0.5)
    if offset:
        x += norm / d**0.5
    x[n - 1] = x[0] + _PLANTED / d**0.5
    return x
