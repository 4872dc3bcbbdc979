"""Certified pairs: right to the last bit float64 gives, whatever the screen rounds (N1-N4, N8, N9)."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import preimage
from preimage.distances import (
    PairScan,
    closest_pairs,
    count_below,
    find_closest,
    nearest_neighbors,
    row_distances,
)
from preimage.distances import scan as scan_module
from preimage.distances.arithmetic import ARITHMETICS
from support.distances import DTYPES, assert_quantiles, between, mixed_sets, oracle, oracle_pairs, row_sets


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
    assert [int(i) for i in (scan.rows.same != torch.arange(300)).nonzero().flatten()] == [200]
    assert (int(scan.nearest.indices[200]), float(scan.nearest.distances[200])) == (3, 0.0)
    assert (int(scan.nearest.indices[3]), float(scan.nearest.distances[3])) == (200, 0.0)
    assert int(scan.nearest.indices[250]) == 9
    assert float(scan.nearest.distances[250]) > 0.0
    assert find_closest(scan, 1)[0] == (3, 200, 0.0)


@settings(max_examples=150, deadline=None)
@given(x=row_sets() | mixed_sets(), k=st.integers(1, 12), tile=st.sampled_from([256, 512, 2048]))
def test_the_oracle_agrees(x: Tensor, k: int, tile: int) -> None:  # N3, N4
    expected = oracle_pairs(x)
    away = oracle(x)
    for arithmetic in (None, *ARITHMETICS):
        scan = PairScan(x, arithmetic=arithmetic, tile=tile)
        assert [tuple(pair) for pair in find_closest(scan, k)] == expected[:k]
        assert torch.equal(scan.nearest.distances, away.amin(dim=1))
        assert torch.equal(scan.nearest.indices, away.argmin(dim=1))
        middle = expected[len(expected) // 2][2]
        thresholds = [0.0, expected[0][2], middle, 2 * expected[-1][2] + 1e-300]
        thresholds += [float(np.nextafter(expected[0][2], np.inf))]
        counts = [sum(pair[2] < threshold for pair in expected) for threshold in thresholds]
        assert count_below(scan, thresholds) == counts
        assert_quantiles(scan, [pair[2] for pair in expected])


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
        scan = PairScan(a, b, arithmetic=arithmetic, tile=tile, counting=True)
        assert scan.pairs == len(expected)
        assert [(pair.distance, pair.first, pair.second) for pair in find_closest(scan, k)] == expected[:k]
        assert torch.equal(scan.nearest.distances, away.amin(dim=1))
        assert torch.equal(scan.nearest.indices, away.argmin(dim=1))
        thresholds = [0.0, expected[len(expected) // 2][0], 2 * expected[-1][0] + 1e-300]
        assert count_below(scan, thresholds) == [sum(p[0] < limit for p in expected) for limit in thresholds]
        assert_quantiles(scan, [pair[0] for pair in expected])


def test_pairs_within_a_radius_are_all_named() -> None:
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(3))
    x[7] = x[5]
    radius = sorted(pair[2] for pair in oracle_pairs(x))[40]
    batches = PairScan(x).pairs_within(radius)
    found = {(int(i), int(j)) for a, b, _ in batches for i, j in zip(a, b, strict=True)}
    expected = {(i, j) for i, j, away in oracle_pairs(x) if away <= radius and 7 not in (i, j)}
    assert found == expected


def test_pairs_are_counted_past_32_bits() -> None:  # N8
    scan = PairScan(torch.zeros(100_000, 1))
    assert scan.pairs == 4_999_950_000
    assert len(scan.rows.firsts) == 1
    assert count_below(scan, [1e-6]) == [4_999_950_000]
    assert find_closest(scan, 2) == [(0, 1, 0.0), (0, 2, 0.0)]


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


def test_the_public_names_take_numpy_too() -> None:
    x = np.random.default_rng(0).normal(size=(40, 6))
    expected = oracle_pairs(torch.from_numpy(x))[:3]
    assert [tuple(pair) for pair in preimage.closest_pairs(x, k=3)] == expected
    indices, distances = preimage.nearest_neighbors(x)
    assert torch.equal(distances, oracle(torch.from_numpy(x)).amin(dim=1))
    assert len(indices) == 40


def test_pairs_stay_even_if_a_recomputed_distance_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's own norms did: other last bits in batches below 16 rows, and an empty answer."""

    def other_bits(x: Tensor, y: Tensor) -> Tensor:
        away = row_distances(x, y)
        return away if len(away) >= 16 else torch.nextafter(away, torch.full_like(away, torch.inf))

    monkeypatch.setattr(scan_module, "row_distances", other_bits)
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    expected = [(i, j) for i, j, _ in oracle_pairs(x)]
    for k in (1, 3, 10):
        assert [(pair.first, pair.second) for pair in find_closest(PairScan(x), k)] == expected[:k]


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


def test_the_script_for_devices_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "docs" / "results" / "certified_pairs.py"
    out = tmp_path / "pairs.json"
    asked = [str(out), "--device", "cpu", "--rows", "300", "--sets", "5", "--widths", "5", "64"]
    assert runpy.run_path(str(script))["main"](asked) == 0
    found = json.loads(out.read_text())
    assert [row["as_oracle"] for row in found["widths"]] == [5, 5]
    assert [row["as_cpu"] for row in found["widths"]] == [5, 5]
    assert capsys.readouterr().out.count("\n") == 3
