"""The closest pairs of many sets of rows, on a device, on the CPU and by an oracle; one json document.

    python docs/results/certified_pairs.py OUT.json [--device cuda] [--rows 6000] [--sets 20] [--seconds 240]

For every width and set: `closest(k)` for k = 1, 3, 10 on the device, pair for pair and bit for bit against an
oracle that shares nothing with the library (float64 products of all pairs on the device; every pair within
their error of the tenth is recomputed by numpy), and against the same calls on the CPU, every row's nearest
neighbour included, as long as ``--seconds`` allow: the document says how many sets that were. Scales,
offsets, types, twins and planted minima vary from set to set. Then the distances of 960 pairs in batches of
other sizes, beside torch's own norm. Exit code 1 if anything differs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from preimage.distances import Pair, PairScan, find_closest, row_distances

KS = (1, 3, 10)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16)
BATCHES = (1, 2, 7, 15, 16, 17, 64)
BLOCK = 2048


def rows_of(n: int, d: int, seed: int) -> Tensor:
    """Gaussian rows of one scale with or without an offset, a planted nearest pair and at times a twin."""
    generator = torch.Generator().manual_seed(1000 * d + seed)
    dtype = DTYPES[seed % len(DTYPES)]
    small = dtype == torch.float16  # which ends at 65,504
    norm = 10.0 ** (seed % 3 + 1) if small else 10.0 ** (seed % 7 - 2)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) * (norm / d**0.5)
    if seed % 2:
        x += norm / d**0.5 * torch.randn(d, generator=generator, dtype=torch.float64)
    x = x.to(dtype)
    a, b, c, e = torch.randperm(n, generator=generator)[:4].tolist()
    x[a] = x[b]
    step = torch.nextafter(x[b, : max(1, d // 8)], torch.full((), torch.inf, dtype=dtype))
    x[a, : max(1, d // 8)] = step  # some units in the last place: hard for every screen
    if seed % 4 == 3:
        x[c] = x[e]
    return x


def lengths(difference: np.ndarray) -> np.ndarray:
    """The distance by its definition, in numpy: squares in a tree of halves over a power of two."""
    width = 1 << max(0, difference.shape[1] - 1).bit_length()
    squares = np.zeros((len(difference), width))
    squares[:, : difference.shape[1]] = difference * difference
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return np.sqrt(squares[:, 0])


def oracle(x: Tensor, k: int) -> list[tuple[int, int, float]]:
    """The k closest of all pairs; x lies on the device, and the few that can be it are decided by numpy."""
    y = x.double() - x.double().mean(dim=0)
    squares = (y * y).sum(dim=1)
    largest = float(squares.max())
    # sums of d products, twice, and the rounding of y: of the sum of the absolute products, at most 4 largest
    error = 4 * largest * 4 * (x.shape[1] + 16) * 2.0**-53
    index = torch.arange(len(y), device=y.device)
    blocks = index.split(BLOCK)

    def values(rows: Tensor) -> Tensor:
        found = squares[rows][:, None] + squares[None, :] - 2 * (y[rows] @ y.T)
        return found.masked_fill_(index[None, :] <= rows[:, None], torch.inf)

    least = torch.cat([values(rows).flatten().topk(k, largest=False).values for rows in blocks])
    limit = least.topk(k, largest=False).values[-1] + 2 * error
    found: list[Tensor] = []
    for rows in blocks:
        i, j = (values(rows) <= limit).nonzero().T
        found.append(torch.stack([rows[i], j], dim=1))
    pairs = torch.cat(found).cpu()
    x = x.cpu()
    away = np.concatenate(
        [lengths((x[p[:, 0]].double() - x[p[:, 1]].double()).numpy()) for p in pairs.split(512)]
    )
    ranked = sorted(zip(away.tolist(), *pairs.T.tolist(), strict=True))
    return [(i, j, distance) for distance, i, j in ranked[:k]]


def scanned(x: Tensor) -> tuple[PairScan, dict[int, list[Pair]]]:
    """A scan, and its closest pairs."""
    scan = PairScan(x)
    return scan, {k: find_closest(scan, k) for k in KS}


def in_batches(device: torch.device, d: int, pairs: int = 960) -> dict[str, Any]:
    """How many pairs have other bits in some batch: ours than numpy's, and torch's norm than in one batch."""
    generator = torch.Generator().manual_seed(d)
    x, y = (torch.randn(pairs, d, generator=generator) for _ in "xy")
    true = torch.from_numpy(lengths(x.double().numpy() - y.double().numpy()))
    x, y = x.to(device), y.to(device)
    whole = torch.linalg.vector_norm(x.double() - y.double(), dim=1)
    ours, theirs = (row_distances(x, y).cpu() != true), torch.zeros(pairs, dtype=torch.bool)
    for size in BATCHES:
        parts = list(zip(x.split(size), y.split(size), strict=True))
        ours |= torch.cat([row_distances(a, b) for a, b in parts]).cpu() != true
        norm = torch.cat([torch.linalg.vector_norm(a.double() - b.double(), dim=1) for a, b in parts])
        theirs |= (norm != whole).cpu()
    return {"d": d, "pairs": pairs, "ours_differ": int(ours.sum()), "torch_norm_differs": int(theirs.sum())}


def main(given: Sequence[str]) -> int:
    """Run, write, print a table; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--sets", type=int, default=20, help="of each width")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 576, 640, 2048, 4096])
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="after which the CPU is not asked any more"
    )
    options = parser.parse_args(given)
    device = torch.device(options.device)
    started = time.perf_counter()
    widths: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for d in options.widths:
        begun = time.perf_counter()
        row: dict[str, Any] = {"d": d, "sets": options.sets, "as_oracle": 0, "cpu_sets": 0, "as_cpu": 0}
        screens: set[str] = set()
        for seed in range(options.sets):
            x = rows_of(options.rows, d, seed)
            there = x.to(device)
            scan, found = scanned(there)
            screens.add(scan.arithmetic)
            true = oracle(there, max(KS))
            right = all([tuple(pair) for pair in found[k]] == true[:k] for k in KS)
            row["as_oracle"] += right
            same = True
            if time.perf_counter() - started < options.seconds:
                here, other = scanned(x)
                same = other == found and all(
                    torch.equal(a.cpu(), b) for a, b in zip(scan.nearest, here.nearest, strict=True)
                )
                row["cpu_sets"] += 1
                row["as_cpu"] += same
            if not (right and same):
                wrong.append({"d": d, "seed": seed, "found": found, "oracle": true, "as_cpu": same})
        row |= {"seconds": time.perf_counter() - begun, "screens": sorted(screens)}
        widths.append(row | {"batches": in_batches(device, d)})
        print(json.dumps(widths[-1]), file=sys.stderr, flush=True)  # noqa: T201  # a script
    document = {
        "rows": options.rows,
        "ks": KS,
        "widths": widths,
        "wrong": wrong,
        "seconds": time.perf_counter() - started,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print("     d  sets  as oracle  on CPU  as CPU  seconds  pairs with other bits (torch's norm)")  # noqa: T201
    for row in widths:
        batches = row["batches"]
        print(  # noqa: T201
            f"{row['d']:6d}{row['sets']:6d}{row['as_oracle']:11d}{row['cpu_sets']:8d}{row['as_cpu']:8d}"
            f"{row['seconds']:9.1f}  {batches['ours_differ']} ({batches['torch_norm_differs']})"
        )
    return int(bool(wrong) or any(row["batches"]["ours_differ"] for row in widths))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
