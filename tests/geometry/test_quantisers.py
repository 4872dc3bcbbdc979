"""Quantisers: states in a few bits."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from preimage.errors import OptionError
from preimage.geometry import Quantiser, QuantiserGrid, measure_geometry
from preimage.geometry.quantiser import GRANULARITIES, RANGES, CodeRange
from support.geometry import captured


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("range_", RANGES)
def test_a_quantiser_is_off_by_half_a_step_at_most(bits: int, granularity: str, range_: str) -> None:  # N13
    x = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) * 3 + 1
    grid = Quantiser(bits, granularity, range_, percentile=100.0).fit(x)
    codes = grid.encode(x)
    stored = grid.decode(codes)
    assert bool(((stored - x.double()).abs() <= grid.step / 2 * (1 + 1e-12)).all())
    assert torch.equal(grid.encode(stored), codes)
    first, last = grid.first, grid.last
    assert first <= int(codes.min()) <= int(codes.max()) <= last
    if granularity != "vector":
        assert torch.equal(grid.encode(x[:7]), codes[:7])  # rows are independent
    assert torch.equal(Quantiser(bits, "vector", range_).fit(x[3:4]).encode(x[3:4]),
                       Quantiser(bits, "vector", range_).fit(x).encode(x)[3:4])  # fmt: skip


def test_absmax_is_the_published_step_and_outliers_flatten_the_rest() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    assert float(Quantiser(8).fit(x).step) == pytest.approx(float(x.abs().max()) / 127)
    x[:, :3] = 300.0  # three shared outliers: 512 rows become one
    assert len(Quantiser(4).fit(x).encode(x).unique(dim=0)) == 1
    assert len(Quantiser(4, "channel").fit(x).encode(x).unique(dim=0)) == 512


def test_a_percentile_cuts_off() -> None:
    x = torch.arange(1.0, 101.0)[:, None]
    grid = Quantiser(8, range="percentile", percentile=90.0).fit(x)
    assert float(grid.step) == pytest.approx(90 / 127)
    assert int(grid.encode(x)[-1]) == 127


@pytest.mark.parametrize(
    "wrong", [{"bits": 1}, {"bits": 17}, {"granularity": "row"}, {"range": "max"}, {"percentile": 0.0}]
)
def test_wrong_quantisers_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        Quantiser(**wrong)  # type: ignore[arg-type]


def test_a_range_is_added_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def unit(x: Tensor, axes: tuple[int, ...], _: float) -> tuple[Tensor, Tensor]:
        high = torch.ones_like(x.amax(axes, keepdim=True))
        return -high, high

    monkeypatch.setitem(RANGES, "unit", CodeRange(unit, symmetric=True))
    x = torch.tensor([[0.5, 3.0], [-1.0, 0.0]])
    assert Quantiser(3, range="unit").fit(x).encode(x).tolist() == [[2, 3], [-3, 0]]
    with pytest.raises(OptionError, match="not known") as refused:
        Quantiser(range="units")
    assert "unit" in str(refused.value.hint)


def test_a_quantiser_of_ones_own_is_given_as_an_object() -> None:
    @dataclass(frozen=True)
    class Coarse(Quantiser):
        def fit(self, x: Tensor) -> QuantiserGrid:
            grid = super().fit(x)
            return replace(grid, step=2 * grid.step)

    states = captured(9)
    own = measure_geometry(states, bits=(None, 4), quantiser=Coarse())
    plain = measure_geometry(states, bits=(None, 4))
    for layer in states.layers:
        step, usual = (shape.quantised[4].layers[layer].quantised for shape in (own, plain))
        assert step is not None
        assert usual is not None
        assert step.step == 2 * usual.step
