"""Rows that can be compared and rows that are refused (N7)."""

import numpy as np
import pytest
import torch

from preimage.distances import closest_pairs, nearest_neighbors, norms, row_distances, same_rows
from preimage.errors import OptionError, StatesError
from support.distances import oracle, oracle_pairs


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused_by_row(bad: float) -> None:  # N7
    x = torch.randn(20, 5)
    x[13, 2] = bad
    with pytest.raises(StatesError, match="row 13 holds NaN or infinity"):
        nearest_neighbors(x)


def test_large_numbers_do_not_overflow() -> None:  # N7
    x = 1e30 * torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(nearest_neighbors(x).distances, oracle(x).amin(dim=1))


def test_rows_with_one_hash_are_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from preimage.distances import rows

    monkeypatch.setattr(rows, "_hash", lambda x: torch.zeros(len(x), dtype=torch.long))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [-0.0, 0.0], [0.0, -0.0]])
    assert same_rows(x).tolist() == [0, 1, 0, 3, 3]


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


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_are_refused(rows: int) -> None:
    with pytest.raises(OptionError, match="make no pair"):
        closest_pairs(torch.zeros(rows, 3))
