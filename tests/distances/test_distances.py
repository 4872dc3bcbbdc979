"""Certified distances: right to the last bit float64 gives, whatever the screen rounds (hardening N1-N9)."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import preimage
from preimage.collisions.tiles import KeptTiles
from preimage.distances import (
    PairScan,
    closest_pairs,
    nearest_neighbors,
    norms,
    relative_error,
    row_distances,
    same_rows,
)
from preimage.distances import direct as direct_module
from preimage.distances import pairs as pairs_module
from preimage.distances.arithmetic import ARITHMETICS, products
from preimage.distances.screen import EachTile, Screen, Tile, TileFound, here
from preimage.errors import OptionError, StatesError

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
    assert scan.spread.pairs == len(exact)
    for q in (0.0, 0.01, 0.5, 0.99, 1.0):
        true = exact[max(0, min(len(exact), int(np.ceil(q * len(exact)))) - 1)]
        found = scan.spread.quantile(q)
        assert found.low <= true <= found.high


def oracle_pairs(x: Tensor) -> list[tuple[int, int, float]]:
    away = oracle(x)
    pairs = [(i, j, float(away[i, j])) for i in range(len(x)) for j in range(i + 1, len(x))]
    return sorted(pairs, key=lambda pair: (pair[2], pair[0], pair[1]))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("norm", [10.0, 100.0, 3000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_planted_pair_is_found_and_measured(dtype: torch.dtype, norm: float, offset: bool) -> None:  # N1
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(700, 64, generator=generator, dtype=torch.float64)
    x = norm * x / x.norm(dim=1, keepdim=True)
    if offset:
        x += norm * torch.ones(64, dtype=torch.float64) / 8
    x[431] = x[17]
    if dtype in (torch.float64, torch.float32):
        x[431, 5] += 1e-2
    rows = x.to(dtype)
    if dtype not in (torch.float64, torch.float32):  # one unit in the last place is more than 1e-2 there
        rows[431, 5] = torch.nextafter(rows[17, 5], torch.tensor(torch.inf, dtype=dtype))
    (pair,) = closest_pairs(rows, k=1)
    assert (pair.first, pair.second) == (17, 431)
    true = abs(float(rows[431, 5].double() - rows[17, 5].double()))
    assert pair.distance == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identical_is_zero_and_one_ulp_is_not(dtype: torch.dtype) -> None:  # N2
    x = torch.randn(300, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[200] = x[3]
    x[250] = x[9]
    x[250, 0] = torch.nextafter(x[9, 0], torch.tensor(torch.inf, dtype=dtype))
    scan = PairScan(x)
    assert [int(i) for i in (scan.same != torch.arange(300)).nonzero().flatten()] == [200]
    assert (int(scan.nearest.indices[200]), float(scan.nearest.distances[200])) == (3, 0.0)
    assert (int(scan.nearest.indices[3]), float(scan.nearest.distances[3])) == (200, 0.0)
    assert int(scan.nearest.indices[250]) == 9
    assert float(scan.nearest.distances[250]) > 0.0
    assert scan.closest(1)[0] == (3, 200, 0.0)


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


@settings(max_examples=150, deadline=None)
@given(x=row_sets() | mixed_sets(), k=st.integers(1, 12), tile=st.sampled_from([256, 512, 2048]))
def test_the_oracle_agrees(x: Tensor, k: int, tile: int) -> None:  # N3, N4
    expected = oracle_pairs(x)
    away = oracle(x)
    for arithmetic in (None, *ARITHMETICS):
        scan = PairScan(x, arithmetic=arithmetic, tile=tile)
        assert [tuple(pair) for pair in scan.closest(k)] == expected[:k]
        assert torch.equal(scan.nearest.distances, away.amin(dim=1))
        assert torch.equal(scan.nearest.indices, away.argmin(dim=1))
        middle = expected[len(expected) // 2][2]
        thresholds = [0.0, expected[0][2], middle, 2 * expected[-1][2] + 1e-300]
        thresholds += [float(np.nextafter(expected[0][2], np.inf))]
        counts = [sum(pair[2] < threshold for pair in expected) for threshold in thresholds]
        assert scan.count_below(thresholds) == counts
        assert_quantiles(scan, [pair[2] for pair in expected])


@pytest.mark.parametrize("twin", ["none", "one"])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_quantiles_lie_within_their_bounds(offset: float, twin: str) -> None:
    x = offset + torch.randn(900, 24, generator=torch.Generator().manual_seed(2))
    if twin == "one":
        x[5] = x[6]
    scan = PairScan(x, tile=256, spread=twin == "none")
    exact = [pair[2] for pair in oracle_pairs(x)]
    assert_quantiles(scan, exact)
    assert scan.spread.quantile(0.5).value == pytest.approx(exact[len(exact) // 2], rel=5e-4)


@pytest.mark.parametrize("tile", [256, 768, 4096])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_neither_tiles_nor_arithmetic_change_a_bit(tile: int, arithmetic: str) -> None:  # N4
    x = 50 + torch.randn(1500, 40, generator=torch.Generator().manual_seed(2))
    reference, other = PairScan(x), PairScan(x, arithmetic=arithmetic, tile=tile)
    assert torch.equal(reference.nearest.distances, other.nearest.distances)
    assert torch.equal(reference.nearest.indices, other.nearest.indices)
    assert reference.closest(25) == other.closest(25)


@settings(max_examples=60, deadline=None)
@given(x=row_sets() | mixed_sets(), arithmetic=st.sampled_from(list(ARITHMETICS)))
def test_the_screen_never_excludes_a_pair_within_its_bound(x: Tensor, arithmetic: str) -> None:  # N5
    screen = Screen(x, arithmetic=ARITHMETICS[arithmetic])
    every = torch.arange(len(x))
    values = screen.arithmetic.product(screen.rows.left, screen.columns.right)[: len(x), : len(x)].double()
    error = screen.bound(every, screen.columns.norms[: len(x)])
    true = oracle(x).fill_diagonal_(0.0)
    for column in every:
        assert bool((values[:, column] <= screen.limits(every, true[:, column]) + error[:, column]).all())
    assert bool((true <= screen.at_most(every, values + error)).all())


@settings(max_examples=60, deadline=None)
@given(
    x=row_sets() | mixed_sets(),
    cut=st.floats(0.1, 0.9),
    k=st.integers(1, 12),
    tile=st.sampled_from([256, 2048]),
)
def test_the_oracle_agrees_between_two_sets(x: Tensor, cut: float, k: int, tile: int) -> None:  # N3
    at = min(max(1, int(cut * len(x))), len(x) - 1)
    a, b = x[:at], x[at:]
    away = between(a, b)
    expected = sorted((float(away[i, j]), i, j) for i in range(len(a)) for j in range(len(b)))
    for arithmetic in (None, *ARITHMETICS):
        scan = PairScan(a, b, arithmetic=arithmetic, tile=tile, spread=True)
        assert scan.pairs == len(expected)
        assert [(pair.distance, pair.first, pair.second) for pair in scan.closest(k)] == expected[:k]
        assert torch.equal(scan.nearest.distances, away.amin(dim=1))
        assert torch.equal(scan.nearest.indices, away.argmin(dim=1))
        thresholds = [0.0, expected[len(expected) // 2][0], 2 * expected[-1][0] + 1e-300]
        assert scan.count_below(thresholds) == [sum(p[0] < limit for p in expected) for limit in thresholds]
        assert_quantiles(scan, [pair[0] for pair in expected])


def test_pairs_within_a_reach_are_all_named() -> None:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(3))
    x[7] = x[5]
    reach = sorted(pair[2] for pair in oracle_pairs(x))[40]
    found = {(int(i), int(j)) for a, b, _ in PairScan(x).within(reach) for i, j in zip(a, b, strict=True)}
    expected = {(i, j) for i, j, away in oracle_pairs(x) if away <= reach and 7 not in (i, j)}
    assert found == expected


def test_tiles_may_be_run_in_any_order_elsewhere() -> None:  # N4
    x = 50 + torch.randn(1500, 40, generator=torch.Generator().manual_seed(2))

    def backwards(screen: Screen, tiles: Sequence[Tile], counting: bool) -> list[TileFound]:
        done = {index: screen.find(tiles[index], counting) for index in reversed(range(len(tiles)))}
        return [done[index] for index in range(len(tiles))]

    scan, other = PairScan(x, tile=256, spread=True), PairScan(x, tile=512, each=backwards, spread=True)
    assert scan.spread.quantile(0.5) == other.spread.quantile(0.5)
    assert torch.equal(scan.nearest.distances, other.nearest.distances)
    assert scan.closest(9) == other.closest(9)


def test_data_that_reduced_precision_cannot_screen_gets_a_finer_one() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8000, 8, generator=generator, dtype=torch.float64)
    x[:4000] *= 1e-6  # half of the rows lie closer together than float32 sees beside the others
    assert PairScan(x).arithmetic == "float64"
    assert PairScan(torch.randn(3000, 8, generator=generator)).arithmetic == "float32"


def test_between_two_sets_the_minima_enclose_the_truth() -> None:
    generator = torch.Generator().manual_seed(8)
    x, y = (7 + torch.randn(n, 20, generator=generator) for n in (300, 700))
    screen = Screen(x, y, tile=256)
    every = torch.arange(len(screen.rows.left))
    minima, error = screen.minima().double(), screen.bound(every, screen.columns.block_norms)
    true = between(x, y) * screen.scale
    blocks = torch.stack([part.amin(dim=1) for part in true.split(256, dim=1)], dim=1)
    low, high = ((minima + sign * error)[:300].clamp_min(0).sqrt() for sign in (-1, 1))
    slack = screen.slack[:300, None]
    assert bool((low - slack <= blocks).all())
    assert bool((blocks <= high + slack).all())


def test_reduced_precision_is_overridden_and_restored() -> None:  # N6
    x = 100 + torch.randn(400, 48, generator=torch.Generator().manual_seed(4))
    expected = PairScan(x).closest(5)
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [place.fp32_precision for place in places]
    try:
        torch.set_float32_matmul_precision("medium")
        with products("ieee"):
            assert [place.fp32_precision for place in places] == ["ieee", "ieee"]
        with products("tf32"):
            assert places[0].fp32_precision == "tf32"
        assert PairScan(x).closest(5) == expected
        assert torch.get_float32_matmul_precision() == "medium"
        places[0].fp32_precision = "ieee"  # the newer way to say it; asking the older then fails
        assert PairScan(x).closest(5) == expected
        assert [place.fp32_precision for place in places] == ["ieee", "bf16"]
    finally:
        torch.set_float32_matmul_precision("highest")  # both ways of saying it must agree again
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def test_both_ways_of_asking_for_the_precision_still_work() -> None:  # N6
    PairScan(torch.randn(50, 4)).closest(1)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused_by_row(bad: float) -> None:  # N7
    x = torch.randn(20, 5)
    x[13, 2] = bad
    with pytest.raises(StatesError, match="row 13 holds NaN or infinity"):
        nearest_neighbors(x)


def test_large_numbers_do_not_overflow() -> None:  # N7
    x = 1e30 * torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nearest_neighbors(x).distances, oracle(x).amin(dim=1))


def test_pairs_are_counted_past_32_bits() -> None:  # N8
    scan = PairScan(torch.zeros(100_000, 1))
    assert scan.pairs == 4_999_950_000
    assert scan.distinct == 1
    assert scan.count_below([1e-6]) == [4_999_950_000]
    assert scan.closest(2) == [(0, 1, 0.0), (0, 2, 0.0)]


def test_invariances() -> None:  # N9
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(600, 24, generator=generator, dtype=torch.float64)
    base = nearest_neighbors(x)
    shuffle = torch.randperm(600, generator=generator)
    moved = nearest_neighbors(x[shuffle])
    assert torch.equal(moved.distances, base.distances[shuffle])
    assert torch.equal(shuffle[moved.indices], base.indices[shuffle])
    wider = nearest_neighbors(torch.cat([x, torch.zeros(600, 7, dtype=torch.float64)], dim=1))
    assert torch.equal(wider.distances, base.distances)
    rotation, _ = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))
    for changed in (x + 1000.0, x @ rotation):
        other = nearest_neighbors(changed)
        assert torch.equal(other.indices, base.indices)
        assert torch.allclose(other.distances, base.distances, rtol=1e-9)


def test_rows_with_one_hash_are_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from preimage.distances import rows

    monkeypatch.setattr(rows, "_hash", lambda x: torch.zeros(len(x), dtype=torch.long))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [-0.0, 0.0], [0.0, -0.0]])
    assert same_rows(x).tolist() == [0, 1, 0, 3, 3]


def test_the_public_names_take_numpy_too() -> None:
    x = np.random.default_rng(0).normal(size=(40, 6))
    expected = oracle_pairs(torch.from_numpy(x))[:3]
    assert [tuple(pair) for pair in preimage.closest_pairs(x, k=3)] == expected
    indices, distances = preimage.nearest_neighbors(x)
    assert torch.equal(distances, oracle(torch.from_numpy(x)).amin(dim=1))
    assert len(indices) == 40


# A distance is a function of the pair alone.

DEFINED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DEFINED, ids=str)
@pytest.mark.parametrize("d", [0, 1, 2, 3, 15, 16, 17, 64, 100, 576, 640, 1000])
def test_a_distance_has_the_same_bits_in_every_batch_and_layout(d: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(d)
    x, y = (10 * torch.randn(40, d, generator=generator, dtype=torch.float64) for _ in "xy")
    x, y = (x > 0, y > 0) if dtype == torch.bool else (x.to(dtype), y.to(dtype))
    true = torch.from_numpy(lengths(x.double().numpy() - y.double().numpy()))
    assert torch.equal(row_distances(x, y), true)
    assert torch.equal(row_distances(y, x), true)
    assert torch.equal(norms(x), torch.from_numpy(lengths(x.double().numpy())))
    for size in (1, 2, 3, 7, 15, 16, 17):
        batches = [row_distances(*part) for part in zip(x.split(size), y.split(size), strict=True)]
        assert torch.equal(torch.cat(batches), true)
    assert torch.equal(torch.stack([row_distances(a, b) for a, b in zip(x, y, strict=True)]), true)
    assert torch.equal(row_distances(x.T.contiguous().T, y), true)
    assert torch.equal(row_distances(x.repeat(1, 2)[:, :d], y.repeat(2, 1)[40:]), true)
    assert torch.equal(row_distances(x[::2], y[::2]), true[::2])
    assert torch.equal(row_distances(x.view(5, 8, d), y.view(5, 8, d)), true.view(5, 8))
    assert torch.equal(row_distances(x[:, None], y[None]).diagonal(), true)
    assert torch.equal(row_distances(x[3], y)[3], true[3])
    padded = (torch.cat([rows, rows.new_zeros(40, 37)], dim=1) for rows in (x, y))
    assert torch.equal(row_distances(*padded), true)


def test_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.randn(6, 9, 70, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    true = row_distances(x, y[:1])
    for most in (1, 69, 70, 200, 700, 3000):
        monkeypatch.setattr(direct_module, "_TOGETHER", {"cpu": most})
        assert torch.equal(row_distances(x, y[:1]), true)
        assert torch.equal(row_distances(x[0, 0], y[0, 0]), true[0, 0])


@settings(max_examples=200, deadline=None)
@given(x=mixed_sets())
def test_the_definition_holds_at_every_magnitude(x: Tensor) -> None:
    away = row_distances(x[:, None], x[None])
    assert torch.equal(away, between(x, x))
    assert torch.equal(away, away.T)
    same = same_rows(x)
    assert torch.equal(away == 0, same[:, None] == same[None])  # rows that differ are never 0 apart
    largest = (x[:, None] - x[None]).abs().amax(dim=2)
    assert bool((away >= largest).all())
    assert bool((away <= largest * x.shape[1] ** 0.5 * (1 + 2 * relative_error(x.shape[1])) + 5e-324).all())


_OTHERWISE = """
import hashlib, numpy as np, torch
from preimage.distances import PairScan, closest_pairs, nearest_neighbors, norms, row_distances
digest = hashlib.sha256()
for d in (5, 64, 576, 1111):
    # numpy's numbers: torch draws others with other instructions
    x = torch.from_numpy(30 + np.random.default_rng(d).normal(size=(300, d))).float()
    for rows in (x, x.double() * 1.1, x.bfloat16(), x.T.contiguous().T):
        nearest = nearest_neighbors(rows)
        for found in (norms(rows), row_distances(rows[:-1], rows[1:]), nearest.distances, nearest.indices):
            digest.update(found.numpy().tobytes())
        digest.update(repr(closest_pairs(rows, 10)).encode())
print(digest.hexdigest())
"""


def test_neither_instruction_set_nor_threads_change_a_bit() -> None:
    found = set()
    for capability, threads in (("default", "1"), ("avx512", "2")):
        chosen = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", _OTHERWISE],
            env={**os.environ, **chosen},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_pairs_stay_even_if_a_recomputed_distance_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a GPU's own norms did: other last bits in batches below 16 rows, and an empty answer."""

    def other_bits(x: Tensor, y: Tensor) -> Tensor:
        away = row_distances(x, y)
        return away if len(away) >= 16 else torch.nextafter(away, torch.full_like(away, torch.inf))

    monkeypatch.setattr(pairs_module, "row_distances", other_bits)
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    expected = [(i, j) for i, j, _ in oracle_pairs(x)]
    for k in (1, 3, 10):
        assert [(pair.first, pair.second) for pair in PairScan(x).closest(k)] == expected[:k]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=2, max_size=14),
    cut=st.integers(1, 13),
    k=st.integers(1, 100),
)
def test_ties_go_to_the_lower_pair(rows: list[tuple[int, int]], cut: int, k: int) -> None:
    x = torch.tensor(rows)
    expected = oracle_pairs(x)[:k]
    assert [tuple(pair) for pair in closest_pairs(x, k)] == expected
    assert len(expected) == min(k, len(rows) * (len(rows) - 1) // 2)
    nearest = nearest_neighbors(x)
    assert torch.equal(nearest.indices, oracle(x).argmin(dim=1))
    a, b = x[: min(cut, len(x) - 1)], x[min(cut, len(x) - 1) :]
    away = between(a, b)
    crossing = sorted((float(away[i, j]), i, j) for i in range(len(a)) for j in range(len(b)))[:k]
    assert [(p.distance, p.first, p.second) for p in closest_pairs(a, k, others=b)] == crossing


def test_twins_at_distance_0_come_in_order() -> None:
    found = closest_pairs(torch.tensor([[0], [1], [2], [0], [1], [2], [0], [1]]), 5)
    assert [(i, j) for i, j, _ in found] == [(0, 3), (0, 6), (1, 4), (1, 7), (2, 5)]


def test_many_twins_on_both_sides_are_not_spelled_out() -> None:
    x, y = torch.zeros(20_000, 2), torch.ones(20_000, 2)
    assert closest_pairs(x, 3, others=x) == [(0, 0, 0.0), (0, 1, 0.0), (0, 2, 0.0)]
    assert [pair[:2] for pair in closest_pairs(x, 2, others=y)] == [(0, 0), (0, 1)]


def test_quantiles_hold_where_float32_would_round_across_a_bin() -> None:
    # one distance only, its scaled square just below the edge of a bin: rounded to float32 it is the edge
    edge = (1 + 5 / 2048) * (1 - 1e-9)
    x = torch.tensor([[0.0], [edge**0.5]], dtype=torch.float64) * 4
    (pair,) = closest_pairs(x, 1)
    found = PairScan(x, arithmetic="float64").spread.quantile(0.5)
    assert found.low <= pair.distance <= found.high


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-1, 1), min_size=2, max_size=12, unique=True),
    arithmetic=st.sampled_from(list(ARITHMETICS)),
    q=st.floats(0, 1),
)
def test_quantile_bounds_hold(values: list[float], arithmetic: str, q: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)[:, None]
    exact = [pair[2] for pair in oracle_pairs(x)]
    found = PairScan(x, arithmetic=arithmetic).spread.quantile(q)
    assert found.low <= exact[max(1, int(np.ceil(q * len(exact)))) - 1] <= found.high
    assert found.low <= found.value <= found.high


# What is refused, and what is taken.


def test_numbers_above_1e150_are_refused_and_those_below_are_not() -> None:
    x = torch.randn(30, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x / x.abs().max() * 1e150
    assert [tuple(pair) for pair in closest_pairs(x, 5)] == oracle_pairs(x)[:5]
    x[11, 2] = -1.01e150
    for call in (closest_pairs, nearest_neighbors):
        with pytest.raises(StatesError, match=r"row 11 holds a number of size 1.01e\+150; .* up to 1e\+150"):
            call(x)
    with pytest.raises(StatesError, match="row 11"):
        closest_pairs(x[:5], others=x)


def test_a_distance_beyond_float64_is_refused() -> None:
    x = torch.tensor([[1.7e308, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert row_distances(x[0], 0 * x[0]) == 1.7e308  # its square is not a float64, it is
    with pytest.raises(StatesError, match=r"farther apart than float64 can say \(1.8e308\)"):
        row_distances(x, -x)
    with pytest.raises(StatesError, match="farther apart"):
        norms(x + 1.7e308)
    bad = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0]], dtype=torch.float64)
    assert norms(bad)[0] == torch.inf  # what is not finite is passed on
    assert bool(norms(bad)[1].isnan())


def test_the_smallest_numbers_are_told_apart() -> None:
    smallest = 5e-324
    x = torch.tensor([[0.0, 0.0], [smallest, 0.0], [1e-320, 0.0], [1e-200, 0.0]], dtype=torch.float64)
    assert [tuple(pair) for pair in closest_pairs(x, 3)] == oracle_pairs(x)[:3]
    assert closest_pairs(x, 1) == [(0, 1, smallest)]
    assert nearest_neighbors(x).indices.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("call", [closest_pairs, nearest_neighbors, lambda x: row_distances(x, x), norms])
def test_complex_numbers_and_integers_beyond_float64_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(StatesError, match="are complex"):
        call(torch.zeros(3, 2, dtype=torch.complex64))
    for dtype in (torch.int64, torch.uint64):
        with pytest.raises(StatesError, match=r"integers beyond 2\^53"):
            call(torch.tensor([[2**53 + 1, 0], [2**53, 0]]).to(dtype))
    call(torch.tensor([[2**53, 0], [-(2**53), 1]]))


def test_integers_and_booleans_are_numbers() -> None:
    wide = np.array([[2**53, 0], [2**53 - 1, 0], [2**53 - 3, 5]])
    assert closest_pairs(wide, 1) == [(0, 1, 1.0)]
    assert closest_pairs(wide.astype(np.uint64), 1) == [(0, 1, 1.0)]
    bits = np.array([[True, False], [False, True], [True, True]])
    assert closest_pairs(bits, 3) == [(0, 2, 1.0), (1, 2, 1.0), (0, 1, 2**0.5)]


def test_arrays_of_any_layout_are_taken() -> None:
    x = np.random.default_rng(1).normal(size=(40, 12))
    expected = closest_pairs(x, 4)
    assert closest_pairs(x.astype(">f8"), 4) == expected
    assert closest_pairs(np.asfortranarray(x), 4) == expected
    assert closest_pairs(x.tolist(), 4) == expected
    assert closest_pairs(torch.from_numpy(x).requires_grad_(), 4) == expected
    backwards = [(39 - j, 39 - i, away) for i, j, away in expected]
    assert [tuple(pair) for pair in closest_pairs(x[::-1], 4)] == backwards


@pytest.mark.parametrize("given", [[["a"]], [[1], [1, 2]], [[2**70], [1]], np.zeros((2, 2), np.longdouble)])
def test_what_is_no_number_is_refused(given: object) -> None:
    with pytest.raises(StatesError, match="cannot be compared"):
        closest_pairs(given)  # type: ignore[arg-type]


def test_rows_of_no_width_are_refused() -> None:
    with pytest.raises(OptionError, match="hold no numbers"):
        closest_pairs(torch.zeros(3, 0))


def test_the_script_for_devices_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "docs" / "results" / "certified_pairs.py"
    out = tmp_path / "pairs.json"
    asked = [str(out), "--device", "cpu", "--rows", "300", "--sets", "5", "--widths", "5", "64"]
    assert runpy.run_path(str(script))["main"](asked) == 0
    found = json.loads(out.read_text())
    assert [row["as_oracle"] for row in found["widths"]] == [5, 5]
    assert [row["as_cpu"] for row in found["widths"]] == [5, 5]
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_are_refused(rows: int) -> None:
    with pytest.raises(OptionError, match="make no pair"):
        closest_pairs(torch.zeros(rows, 3))


def test_finished_tiles_are_found_again(tmp_path: Path) -> None:  # J1
    x = torch.randn(1500, 12, generator=torch.Generator().manual_seed(7))
    run: list[Tile] = []

    class Stopping(Screen):
        def find(self, tile: Tile, counting: bool = False) -> TileFound:
            if len(run) == 9:
                raise KeyboardInterrupt
            run.append(tile)
            return super().find(tile, counting)

    def scan(each: EachTile) -> PairScan:
        return PairScan(x, tile=256, spread=True, each=each)

    def stopped(screen: Screen, tiles: Sequence[Tile], counting: bool) -> Iterator[TileFound]:
        screen.__class__ = Stopping
        return KeptTiles(tmp_path, at_least=1)(screen, tiles, counting)

    with pytest.raises(KeyboardInterrupt):
        scan(stopped).closest(1)
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 9
    kept[0].write_bytes(kept[0].read_bytes()[:-20])  # a damaged one is made again
    before = {path.name: path.stat().st_mtime_ns for path in kept[1:]}
    again, fresh = scan(KeptTiles(tmp_path, at_least=1)), scan(here)
    assert again.closest(5) == fresh.closest(5)
    assert torch.equal(again.nearest.indices, fresh.nearest.indices)
    assert again.spread.quantile(0.5) == fresh.spread.quantile(0.5)
    assert before == {name: (tmp_path / name).stat().st_mtime_ns for name in before}
    assert len(list(tmp_path.iterdir())) == 21
    KeptTiles(tmp_path).forget()
    assert not tmp_path.exists()
