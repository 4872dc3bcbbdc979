"""All distances by float64 differences, written again; sets of rows that are hard to compare."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from preimage.distances import PairScan, distance_distribution

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def lengths(difference: np.ndarray) -> np.ndarray:
    """The definition, written again: squares of float64 in a tree of halves over a power of two."""
    largest = np.abs(difference).max(axis=-1, keepdims=True, initial=0.0)
    by = np.where(largest < 2.0**-400, 2.0**600, np.where(largest >= 2.0**400, 2.0**-600, 1.0))
    width = 2 ** int(np.ceil(np.log2(max(1, difference.shape[-1]))))
    squares = np.zeros((*difference.shape[:-1], width))
    squares[..., : difference.shape[-1]] = (difference * by) * (difference * by)
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return np.sqrt(squares[..., 0]) / by[..., 0]


def between(x: Tensor, y: Tensor) -> Tensor:
    """All distances between two sets by numpy: nothing of preimage in it."""
    a, b = (rows.double().numpy() for rows in (x, y))
    return torch.from_numpy(lengths(a[:, None] - b[None]))


def oracle(x: Tensor) -> Tensor:
    """All distances by direct float64 differences, the diagonal infinite."""
    return between(x, x).fill_diagonal_(torch.inf)


def assert_quantiles(scan: PairScan, exact: list[float]) -> None:
    """All pairs are counted, and quantiles lie within their bounds; ``exact`` is sorted."""
    distribution = distance_distribution(scan)
    assert distribution.pairs == len(exact)
    for q in (0.0, 0.01, 0.5, 0.99, 1.0):
        true = exact[max(0, min(len(exact), int(np.ceil(q * len(exact)))) - 1)]
        found = distribution.quantile(q)
        assert found.low <= true <= found.high


def oracle_pairs(x: Tensor) -> list[tuple[int, int, float]]:
    away = oracle(x)
    pairs = [(i, j, float(away[i, j])) for i in range(len(x)) for j in range(i + 1, len(x))]
    return sorted(pairs, key=lambda pair: (pair[2], pair[0], pair[1]))


@st.composite
def mixed_sets(draw: st.DrawFn) -> Tensor:
    """Float64 rows of any magnitude that is taken, from the smallest number there is to 1e150."""
    n, d = draw(st.integers(2, 24)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    sizes = draw(st.lists(st.integers(-323, 149), min_size=1, max_size=4))
    which = torch.randint(len(sizes), (n, 1), generator=generator)
    x *= torch.tensor([float(f"1e{size}") for size in sizes], dtype=torch.float64)[which]
    if draw(st.booleans()):  # all about one point, so that the differences are of mixed size
        x += draw(st.sampled_from([1.0, 1e-310, 1e149]))
    for _ in range(draw(st.integers(0, 4))):
        a, b = (int(torch.randint(n, (1,), generator=generator)) for _ in "ab")
        x[a] = x[b]
        if draw(st.booleans()):
            x[a, 0] = torch.nextafter(x[b, 0], torch.tensor(0.5, dtype=torch.float64))
    return x


@st.composite
def row_sets(draw: st.DrawFn) -> Tensor:
    n, d = draw(st.integers(2, 40)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x *= 10.0 ** draw(st.integers(-6, 6))
    x += draw(st.sampled_from([0.0, 1.0, 3000.0, -1e6]))
    if draw(st.booleans()):  # a few rows of very different size
        x[: n // 3] *= 1e4
    for _ in range(draw(st.integers(0, 6))):  # duplicates and near duplicates
        a, b = (int(torch.randint(n, (1,), generator=generator)) for _ in "ab")
        x[a] = x[b]
        if draw(st.booleans()):
            x[a, 0] *= 1 + 1e-7
    return x.to(draw(st.sampled_from([torch.float64, torch.float32])))
