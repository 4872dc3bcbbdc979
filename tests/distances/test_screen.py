"""The screen drops no pair it must keep, whatever it rounds and in whatever order (N4-N6)."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from preimage.distances import PairScan, distance_distribution, find_closest
from preimage.distances.arithmetic import ARITHMETICS, products
from preimage.distances.screen import Screen, Tile, TileMinima
from support.distances import between, mixed_sets, oracle, row_sets


@pytest.mark.parametrize("tile", [256, 768, 4096])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_neither_tiles_nor_arithmetic_change_a_bit(tile: int, arithmetic: str) -> None:  # N4
    x = 50 + torch.randn(1500, 40, generator=torch.Generator().manual_seed(2))
    reference, other = PairScan(x), PairScan(x, arithmetic=arithmetic, tile=tile)
    assert torch.equal(reference.nearest.distances, other.nearest.distances)
    assert torch.equal(reference.nearest.indices, other.nearest.indices)
    assert find_closest(reference, 25) == find_closest(other, 25)


@settings(max_examples=60, deadline=None)
@given(x=row_sets() | mixed_sets(), arithmetic=st.sampled_from(list(ARITHMETICS)))
def test_the_screen_never_excludes_a_pair_within_its_bound(x: Tensor, arithmetic: str) -> None:  # N5
    screen = Screen(x, arithmetic=ARITHMETICS[arithmetic])
    every = torch.arange(len(x))
    values = screen.arithmetic.product(screen.rows.left, screen.columns.right)[: len(x), : len(x)].double()
    error = screen.value_error(screen.rows.norms[every][:, None], screen.columns.norms[: len(x)])
    true = oracle(x).fill_diagonal_(0.0)
    for column in every:
        limits = screen.squared_limits(every, true[:, column])
        assert bool((values[:, column] <= limits + error[:, column]).all())
    assert bool((true <= screen.distances_at_most(every, values + error)).all())


def test_tiles_may_be_run_in_any_order_elsewhere() -> None:  # N4
    x = 50 + torch.randn(1500, 40, generator=torch.Generator().manual_seed(2))

    def backwards(screen: Screen, tiles: Sequence[Tile], counting: bool) -> list[TileMinima]:
        done = {index: screen.find(tiles[index], counting) for index in reversed(range(len(tiles)))}
        return [done[index] for index in range(len(tiles))]

    scan, other = PairScan(x, tile=256, counting=True), PairScan(x, tile=512, each=backwards, counting=True)
    assert distance_distribution(scan).quantile(0.5) == distance_distribution(other).quantile(0.5)
    assert torch.equal(scan.nearest.distances, other.nearest.distances)
    assert find_closest(scan, 9) == find_closest(other, 9)


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
    minima = screen.minima().double()
    error = screen.value_error(screen.rows.norms[:, None], screen.columns.block_norms)
    true = between(x, y) * screen.scale
    blocks = torch.stack([part.amin(dim=1) for part in true.split(256, dim=1)], dim=1)
    low, high = ((minima + sign * error)[:300].clamp_min(0).sqrt() for sign in (-1, 1))
    slack = screen.slack[:300, None]
    assert bool((low - slack <= blocks).all())
    assert bool((blocks <= high + slack).all())


def test_reduced_precision_is_overridden_and_restored() -> None:  # N6
    x = 100 + torch.randn(400, 48, generator=torch.Generator().manual_seed(4))
    expected = find_closest(PairScan(x), 5)
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [place.fp32_precision for place in places]
    try:
        torch.set_float32_matmul_precision("medium")
        with products("ieee"):
            assert [place.fp32_precision for place in places] == ["ieee", "ieee"]
        with products("tf32"):
            assert places[0].fp32_precision == "tf32"
        assert find_closest(PairScan(x), 5) == expected
        assert torch.get_float32_matmul_precision() == "medium"
        places[0].fp32_precision = "ieee"  # the newer way to say it; asking the older then fails
        assert find_closest(PairScan(x), 5) == expected
        assert [place.fp32_precision for place in places] == ["ieee", "bf16"]
    finally:
        torch.set_float32_matmul_precision("highest")  # both ways of saying it must agree again
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def test_both_ways_of_asking_for_the_precision_still_work() -> None:  # N6
    find_closest(PairScan(torch.randn(50, 4)), 1)
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False
