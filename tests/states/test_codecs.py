"""States kept in few bits: the codec is found out from the numbers, and every cell holds what was there."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from preimage.errors import StatesError
from preimage.states import Cells, dequantised, may_be_stored, stored_cells
from support.refusing import refused

AXES: dict[str, int | tuple[int, int]] = {"per tensor": (0, 1), "per token": 1, "per channel": 0}
CARRIERS = (torch.float32, torch.float16, torch.bfloat16)


def states(positions: int = 12, width: int = 96, seed: int = 0) -> Tensor:
    """Rows as states are: channels of different sizes, and a first row with outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(positions, width, generator=generator) * (0.3 + torch.rand(width, generator=generator))
    x[0, 3] = 5.0
    return x


def symmetric(x: Tensor, axis: int | tuple[int, int], top: int, steps: int) -> Tensor:
    scale = x.abs().amax(axis, keepdim=True) / steps
    return (x / scale).round().clamp(-top - 1, top) * scale


def with_zero_point(x: Tensor, axis: int | tuple[int, int], top: int) -> Tensor:
    low, high = x.amin(axis, keepdim=True).clamp_max(0), x.amax(axis, keepdim=True).clamp_min(0)
    scale = (high - low) / (2 * top + 1)
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 2 * top + 1) - zero) * scale


def with_offset(x: Tensor, axis: int | tuple[int, int], top: int) -> Tensor:
    low = x.amin(axis, keepdim=True)
    scale = (x.amax(axis, keepdim=True) - low) / (2 * top + 1)
    return ((x - low) / scale).round() * scale + low


def fp8(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    top = torch.finfo(dtype).max
    return (x / scale).clamp(-top, top).to(dtype).float() * scale


def holds(cells: Cells, x: Tensor) -> bool:
    return bool(((cells.low <= x.double()) & (x.double() <= cells.high)).all())


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
@pytest.mark.parametrize("granularity", AXES)
@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("int4", 7)])
def test_whole_numbers_times_a_step_are_found_out(
    name: str, top: int, granularity: str, carrier: torch.dtype
) -> None:
    x, axis = states(), AXES[granularity]
    for steps in (top, top + 1):
        stored = symmetric(x, axis, top, steps).to(carrier).float()
        for said in (None, name):
            cells = stored_cells(stored, said, torch.float32)
            assert cells.name == f"{name} {granularity}"
            assert holds(cells, x)
            width = (cells.high - cells.low)[torch.isfinite(cells.high - cells.low)]
            step = x.abs().amax(axis, keepdim=True) / steps
            assert float(width.max()) < 1.5 * float(step.max()) + 0.02 * float(x.abs().max())
    cells = stored_cells(with_zero_point(x, axis, top).to(carrier).float(), None, torch.float32)
    assert cells.name == f"{name} {granularity} with a zero point"
    assert holds(cells, x)
    if carrier is torch.float32 or (name == "int4" and carrier is torch.float16):
        cells = stored_cells(with_offset(x, axis, top).to(carrier).float(), name, torch.float32)
        assert (cells.name, holds(cells, x)) == (f"{name} {granularity} with an offset", True)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_groups_along_the_width_are_found_out(size: int) -> None:
    x = states(8, 256)
    stored = symmetric(x.reshape(-1, size), 1, 7, 7).reshape(x.shape)
    cells = stored_cells(stored, None, torch.float32)
    assert (cells.name, holds(cells, x)) == (f"int4 per group of {size}", True)


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
@pytest.mark.parametrize("granularity", AXES)
@pytest.mark.parametrize(("short", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_is_found_out_with_any_scale(
    short: str, dtype: torch.dtype, granularity: str, carrier: torch.dtype
) -> None:
    x = states()
    scale = x.abs().amax(AXES[granularity], keepdim=True) / torch.finfo(dtype).max
    for scales, name in ((scale, f"fp8 {short} {granularity}"), (2.0 ** scale.log2().ceil(), f"fp8 {short}")):
        cells = stored_cells(fp8(x, dtype, scales).to(carrier).float(), None, torch.float32)
        assert cells.name.startswith(name)
        assert holds(cells, x)
        width = (cells.high - cells.low) / x.abs()
        assert float(width.flatten().kthvalue(int(0.8 * x.numel())).values) < 0.35
    for fixed in (1.0, 0.037):
        cells = stored_cells(fp8(x, dtype, torch.tensor(fixed)), "fp8", torch.float32)
        assert cells.name.startswith(f"fp8 {short} per tensor")
        assert holds(cells, x)


def test_what_was_cut_off_is_open_outward() -> None:
    x = states()
    cut = x.abs().flatten().kthvalue(int(0.95 * x.numel())).values
    stored = (x / (cut / 127)).round().clamp(-127, 127) * (cut / 127)
    cells = stored_cells(stored, "int8", torch.float32)
    assert holds(cells, x)
    assert bool(torch.isinf(cells.high[x > 1.01 * cut]).all())
    assert bool(torch.isfinite(cells.low[x > 1.01 * cut]).all())
    inside = x.abs() < 0.98 * cut
    assert bool(torch.isfinite(cells.low[inside]).all() and torch.isfinite(cells.high[inside]).all())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    positions=st.integers(1, 9),
    width=st.sampled_from([5, 32, 64, 576]),
    exponent=st.integers(-6, 6),
    carrier=st.sampled_from(CARRIERS),
)
def test_floats_are_never_taken_for_codes(
    seed: int, positions: int, width: int, exponent: int, carrier: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(positions, width, generator=generator) * 10.0 ** min(exponent, 1)
    if seed % 3 == 0:
        x[0, 0] *= 1000.0
    if seed % 5 == 0:
        x[:, -1] = 0.0
    stored = x.to(carrier)
    names = {torch.float32: "float32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    cells = stored_cells(stored.float(), None, torch.float32)
    if carrier is torch.float32:
        assert cells.exact
        assert torch.equal(cells.low, x.double())
    assert cells.name in (names[carrier], "bf16")  # a few halves may be bf16 by chance
    if width == 576 and carrier is torch.float32:
        for name in ("int8", "int4", "fp8"):
            error = refused(StatesError, lambda name=name: stored_cells(x, name, torch.float32))
            assert name in error.message


def test_a_first_look_lets_plain_states_pass_and_stops_all_others() -> None:
    x = torch.stack([states(seed=seed) for seed in range(3)])
    lengths = torch.tensor([12, 5, 1])
    assert may_be_stored(x, lengths, torch.float32).tolist() == [False, False, False]
    coded: list[Callable[[Tensor], Tensor]] = [
        lambda one: symmetric(one, 1, 127, 127),
        lambda one: symmetric(one, 0, 7, 7),
        lambda one: with_offset(one, 1, 127),
        lambda one: with_zero_point(one, 0, 127),
        lambda one: fp8(one, torch.float8_e4m3fn, one.abs().amax(1, keepdim=True) / 448),
        lambda one: one.bfloat16().float(),
        lambda one: one.half().float(),
    ]
    for code in coded:
        mixed = torch.stack([x[0], code(x[1]), x[2]])
        assert may_be_stored(mixed, torch.tensor([12, 12, 12]), torch.float32).tolist() == [
            False,
            True,
            False,
        ]

    assert may_be_stored(x.half(), lengths, torch.float32).all()


def test_odd_states_are_sane() -> None:
    zeros = torch.zeros(3, 8)
    assert stored_cells(zeros, None, torch.float32).name in ("bf16", "float32")
    refused(StatesError, lambda: stored_cells(zeros, "int8", torch.float32))
    for value in (math.nan, math.inf):
        broken = states()
        broken[1, 2] = value
        for said in (None, "int8", "bf16"):
            refused(StatesError, lambda said=said: stored_cells(broken, said, torch.float32))  # noqa: B023
    constant = torch.full((2, 6), 0.3)
    assert stored_cells(constant, None, torch.float32).exact
    x = states()
    x[4] = 0.0
    x[:, 9] = 0.0
    for axis in AXES.values():
        stored = symmetric(x, axis, 127, 127).nan_to_num()
        assert holds(stored_cells(stored, "int8", torch.float32), x)
    refused(StatesError, lambda: stored_cells(states(), "bf16", torch.float32))
    refused(StatesError, lambda: stored_cells(states(1), "int8", torch.float32))


def test_few_codes_are_not_given_narrow_cells() -> None:
    """An outlier leaves next to no codes: whatever step explains them, what was there is inside."""
    told = 0
    for seed in range(8):
        x = states(24, 96, seed) + 0.05
        x[0, 5] = 30.0
        for top in (7, 127):
            for steps in (top, top + 1):
                stored = symmetric(x, (0, 1), top, steps)
                try:
                    cells = stored_cells(stored, f"int{4 if top == 7 else 8}", torch.float32)
                except StatesError:  # too few to tell
                    continue
                told += 1
                assert holds(cells, x), cells.name
    assert told > 16


def test_the_roundoff_of_cells_bounds_what_was_changed() -> None:
    x = states()
    for stored in (symmetric(x, 1, 127, 127), x.bfloat16().float()):
        cells = stored_cells(stored, None, torch.float32)
        changed = ((stored - x).double().norm(dim=1) / x.double().norm(dim=1)).max()
        assert float(changed) <= 1.01 * cells.roundoff < 0.2
    assert stored_cells(x, None, torch.float32).roundoff == 0.0


def test_codes_with_scales_are_multiplied_out() -> None:
    codes = torch.tensor([[1, -2, 3, 4], [5, 6, -7, 8], [0, 1, 0, 1]], dtype=torch.int8)
    rows, columns = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.0, 10.0, 100.0, 1000.0])
    wanted = codes.float() * rows[:, None]
    assert torch.equal(dequantised(codes, rows), wanted)
    assert torch.equal(dequantised(codes, rows[:, None]), wanted)
    assert torch.equal(dequantised(codes, columns), codes.float() * columns)
    assert torch.equal(dequantised(codes, columns[None]), codes.float() * columns)
    assert torch.equal(dequantised(codes, 0.25), codes.float() / 4)
    assert torch.equal(
        dequantised(codes, 2.0, torch.tensor([1, 1, 0])), (codes - torch.tensor([[1], [1], [0]])) * 2.0
    )
    groups = torch.tensor([[1.0, 2.0]] * 3)
    assert torch.equal(dequantised(codes, groups), codes * torch.tensor([1.0, 1.0, 2.0, 2.0]))
    eight = torch.randn(3, 4).to(torch.float8_e4m3fn)
    assert torch.equal(dequantised(eight, rows), eight.float() * rows[:, None])
    refused(StatesError, lambda: dequantised(codes, torch.ones(5)))
    refused(StatesError, lambda: dequantised(codes[:, :3], rows))  # three rows or three columns?
    refused(StatesError, lambda: dequantised(codes, torch.ones(2, 3, 4)))
