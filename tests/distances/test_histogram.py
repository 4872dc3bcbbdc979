"""Quantiles of distances lie within the bounds they are given with."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preimage.distances import PairScan, closest_pairs, distance_distribution
from preimage.distances.arithmetic import ARITHMETICS
from support.distances import assert_quantiles, oracle_pairs


@pytest.mark.parametrize("twin", ["none", "one"])
@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_quantiles_lie_within_their_bounds(offset: float, twin: str) -> None:
    x = offset + torch.randn(900, 24, generator=torch.Generator().manual_seed(2))
    if twin == "one":
        x[5] = x[6]
    scan = PairScan(x, tile=256, counting=twin == "none")
    exact = [pair[2] for pair in oracle_pairs(x)]
    assert_quantiles(scan, exact)
    assert distance_distribution(scan).quantile(0.5).value == pytest.approx(exact[len(exact) // 2], rel=5e-4)


def test_quantiles_hold_where_float32_would_round_across_a_bin() -> None:
    # one distance only, its scaled square just below the edge of a bin: rounded to float32 it is the edge
    edge = (1 + 5 / 2048) * (1 - 1e-9)
    x = torch.tensor([[0.0], [edge**0.5]], dtype=torch.float64) * 4
    (pair,) = closest_pairs(x, 1)
    found = distance_distribution(PairScan(x, arithmetic="float64")).quantile(0.5)
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
    found = distance_distribution(PairScan(x, arithmetic=arithmetic)).quantile(q)
    assert found.low <= exact[max(1, int(np.ceil(q * len(exact)))) - 1] <= found.high
    assert found.low <= found.value <= found.high
