"""Quantisers on any states: half a step within the range, stable, and every row for itself (N13)."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from preimage.geometry import Quantiser
from preimage.geometry.quantiser import GRANULARITIES, RANGES

quantisers = st.builds(
    Quantiser,
    bits=st.integers(2, 16),
    granularity=st.sampled_from(list(GRANULARITIES)),
    range=st.sampled_from(list(RANGES)),
    percentile=st.sampled_from([50.0, 99.0, 100.0]),
)


@st.composite
def states(draw: st.DrawFn) -> Tensor:
    """Rows of very different size, some of them zeros, some equal, some with one outlier."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 3.0, 1e6]), min_size=rows, max_size=rows))
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    x = (x + draw(st.sampled_from([0.0, 2.0, -5.0]))) * torch.tensor(sizes, dtype=torch.float64)[:, None]
    if draw(st.booleans()):
        x[0, 0] = 1e4
    if draw(st.booleans()):
        x[-1] = x[0]
    return x.to(draw(st.sampled_from([torch.float64, torch.float32])))


@settings(max_examples=80)
@given(x=states(), quantiser=quantisers)
def test_what_lies_within_the_range_moves_by_half_a_step(x: Tensor, quantiser: Quantiser) -> None:
    grid = quantiser.fit(x)
    codes = grid.encode(x)
    stored, exact = grid.decode(codes), x.double()
    first, last = quantiser.codes
    assert first <= int(codes.min()) <= int(codes.max()) <= last
    ends = [grid.decode(torch.full_like(codes, end)) for end in (first, last)]
    within = (exact >= ends[0]) & (exact <= ends[1])
    half = (grid.step / 2).expand_as(exact)
    assert bool(((stored - exact).abs() <= half * (1 + 1e-9))[within].all())
    if quantiser.range != "percentile" or quantiser.percentile == 100.0:  # nothing is cut off
        assert bool(((stored - exact).abs() <= half * (1 + 1e-9)).all())
    assert torch.equal(stored[~within & (exact > 0)], ends[1][~within & (exact > 0)])  # the nearest end
    assert torch.equal(stored[~within & (exact < 0)], ends[0][~within & (exact < 0)])
    assert bool((stored[exact == 0] == 0).all())  # 0 is stored as it is


@settings(max_examples=80)
@given(x=states(), quantiser=quantisers)
def test_what_is_stored_is_stored_as_itself(x: Tensor, quantiser: Quantiser) -> None:
    grid = quantiser.fit(x)
    codes = grid.encode(x)
    assert torch.equal(grid.encode(grid.decode(codes)), codes)
    assert torch.equal(grid.decode(grid.encode(grid.decode(codes))), grid.decode(codes))


@settings(max_examples=80)
@given(x=states(), quantiser=quantisers, seed=st.integers(0, 2**31))
def test_rows_are_stored_each_for_itself(x: Tensor, quantiser: Quantiser, seed: int) -> None:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    grid = quantiser.fit(x)
    codes = grid.encode(x)
    assert torch.equal(grid.at(order).encode(x[order]), codes[order])
    assert torch.equal(quantiser.fit(x[order]).encode(x[order]), codes[order])  # order is no matter
    for row in range(len(x)):
        alone = x[row : row + 1]
        assert torch.equal(grid.at(torch.tensor([row])).encode(alone), codes[row : row + 1])
        if quantiser.granularity == "vector":
            assert torch.equal(quantiser.fit(alone).encode(alone), codes[row : row + 1])
