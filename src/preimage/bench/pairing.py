"""Certified distances of all pairs against the bare matrix products inside them."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from preimage.bench.timing import hardware_of, seconds
from preimage.distances import PairScan
from preimage.distances.screen import bare_products
from preimage.errors import OptionError
from preimage.models.loading import parse_device
from preimage.progress import Progress, silent


def bench_pairs(
    n: int = 20_000,
    d: int = 576,
    *,
    rounds: int = 3,
    device: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The certified minimum and every row's nearest neighbour, beside the products alone.

    ``fraction_of_matmul``: seconds of the float32 products of the same upper-triangle tiles, with nothing
    done to them, over ours; medians of rounds that take turns. The rows are random and off centre, one pair
    of them close.
    """
    if n < 2 or d < 1 or rounds < 1:
        raise OptionError(f"n = {n}, d = {d}, rounds = {rounds}.", "Give n >= 2, d >= 1, rounds >= 1.")
    on = parse_device(device)
    x = 3 + torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    x[n - 1] = x[0] + 1e-3 / d**0.5
    x = x.to(on)
    ours, bare = [], []
    scan = PairScan(x[: min(n, 2048)])  # warm
    for done in range(rounds):
        progress(done, rounds, "rounds")
        bare.append(seconds(lambda: bare_products(x), on))

        def certified() -> None:
            nonlocal scan
            scan = PairScan(x)
            scan.closest(1)

        ours.append(seconds(certified, on))
    took = statistics.median(ours)
    (pair,) = scan.closest(1)
    return {
        "fraction_of_matmul": statistics.median(bare) / took,
        "pairs_per_second": scan.pairs / took,
        "pairs": scan.pairs,
        "n": n,
        "d": d,
        "seconds": took,
        "product_seconds": statistics.median(bare),
        "closest": {"first": pair.first, "second": pair.second, "distance": pair.distance},
        "hardware": hardware_of(on),
    }
