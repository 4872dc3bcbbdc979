"""Certified distances: right to the last bit float64 gives, whatever the screen rounds (hardening N1-N9)."""

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
from preimage.distances import PairScan, closest_pairs, nearest_neighbors, row_distances, same_rows
from preimage.distances.arithmetic import ARITHMETICS, products
from preimage.distances.screen import EachTile, Screen, Tile, TileFound, here
from preimage.errors import OptionError, StatesError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def oracle(x: Tensor) -> Tensor:
    """All distances by direct float64 differences, the diagonal infinite."""
    away = row_distances(x[:, None], x[None])
    return away.fill_diagonal_(torch.inf)


def assert_quantiles(scan: PairScan, exact: list[float]) -> None:
    """All pairs are counted, and quantiles lie within their bounds; ``exact`` is sorted."""
    assert scan.spread.pairs == len(exact)
    for q in (0.0, 0.01, 0.5, 0.99, 1.0):
        true = exact[max(0, min(len(exact), int(np.ceil(q * len(exact)))) - 1)]
        found = scan.spread.quantile(q)
        assert found.low <= true * (1 + 1e-12)
        assert true <= found.high * (1 + 1e-12)


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
@given(x=row_sets(), k=st.integers(1, 12), tile=st.sampled_from([256, 512, 2048]))
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
@given(x=row_sets(), arithmetic=st.sampled_from(list(ARITHMETICS)))
def test_the_screen_never_excludes_a_pair_within_its_bound(x: Tensor, arithmetic: str) -> None:  # N5
    screen = Screen(x, arithmetic=ARITHMETICS[arithmetic])
    every = torch.arange(len(x))
    values = screen.arithmetic.product(screen.rows.left, screen.columns.right)[: len(x), : len(x)].double()
    error = screen.bound(every, screen.columns.norms[: len(x)])
    true = oracle(x) * screen.scale
    apart = torch.isfinite(true)
    slack = screen.slack[: len(x), None].expand_as(true)[apart]
    low, high = (values - error)[apart].clamp_min(0).sqrt(), (values + error)[apart].clamp_min(0).sqrt()
    assert bool((low <= true[apart] * (1 + 1e-12) + slack).all())
    assert bool((true[apart] <= high * (1 + 1e-12) + slack).all())


@settings(max_examples=60, deadline=None)
@given(x=row_sets(), cut=st.floats(0.1, 0.9), k=st.integers(1, 12), tile=st.sampled_from([256, 2048]))
def test_the_oracle_agrees_between_two_sets(x: Tensor, cut: float, k: int, tile: int) -> None:  # N3
    at = min(max(1, int(cut * len(x))), len(x) - 1)
    a, b = x[:at], x[at:]
    away = row_distances(a[:, None], b[None])
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
    true = row_distances(x[:, None], y[None]) * screen.scale
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
    assert torch.allclose(wider.distances, base.distances, rtol=1e-14)
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
