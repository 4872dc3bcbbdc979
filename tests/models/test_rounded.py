"""Weights rounded to few bits: every number against the definition, and what stays as it was."""

import copy

import pytest
import torch
from torch import nn

from preimage.errors import OptionError
from preimage.models import new_model
from preimage.models.rounded import ROUNDINGS, rounded, rounded_copy
from support.refusing import refused

# magnitudes of a 4-bit float with two bits of exponent and one of mantissa, over the largest
_E2M1 = [0.0, 0.0625 / 12, 2 / 12, 3 / 12, 4 / 12, 6 / 12, 8 / 12, 1.0]


@pytest.mark.parametrize("width", [1, 64, 100, 130])
@pytest.mark.parametrize("kind", ["fp4", "nf4"])
def test_every_weight_goes_to_the_nearest_code(kind: str, width: int) -> None:
    weight = torch.randn(5, width)
    codes = _codes(kind)
    new = rounded(weight, kind)
    for row in range(5):
        for start in range(0, width, 64):
            block = weight[row, start : start + 64]
            largest = block.abs().max()
            distance = (block[:, None] / largest - codes[None]).abs()
            off = (new[row, start : start + 64] / largest - block / largest).abs()
            torch.testing.assert_close(off, distance.min(dim=1).values, atol=1e-6, rtol=0)
    assert torch.equal(rounded(new, kind), new), "what was rounded is not rounded again"


def test_int8_takes_a_step_a_row() -> None:
    weight = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    new = rounded(weight, "int8")
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((new - weight).abs() <= step / 2 * 1.0001).all()
    codes = new / step
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    torch.testing.assert_close(new.abs().amax(1), weight.abs().amax(1))


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_zeros_stay_zeros(kind: str) -> None:
    assert torch.equal(rounded(torch.zeros(3, 70), kind), torch.zeros(3, 70))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ROUNDINGS)
def test_blocks_are_rounded_and_nothing_else(kind: str, family: str) -> None:
    model = new_model(family, (64, 2, 2), vocabulary=50, max_length=16, device="cpu")
    before = copy.deepcopy(model.module.state_dict())
    new = rounded_copy(model, kind)
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    changed = {
        name for name, value in new.module.state_dict().items() if not torch.equal(value, before[name])
    }
    matrices = {
        f"{name}.weight"
        for block in model.anatomy.blocks
        for name, part in model.module.named_modules()
        if any(part is one for one in block.modules())
        and getattr(getattr(part, "weight", None), "ndim", 0) == 2
    }
    assert changed == matrices
    for name in matrices:  # along the inputs of each row, however a module keeps them
        part = model.module.get_submodule(name.removesuffix(".weight"))
        kept, made = before[name], new.module.state_dict()[name]
        assert torch.equal(
            made, rounded(kept, kind) if isinstance(part, nn.Linear) else rounded(kept.T, kind).T
        )
    assert new.name == f"{model.name} in {kind}"
    assert new.identity != model.identity


def test_a_rounding_that_is_not_known() -> None:
    model = new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    assert "'int3'" in refused(OptionError, lambda: rounded_copy(model, "int3")).message


def _codes(kind: str) -> torch.Tensor:
    if kind == "fp4":
        return torch.tensor(sorted({sign * one for one in _E2M1 for sign in (-1, 1)}))
    # quantiles of the normal distribution, zero among them (arXiv 2305.14314, appendix E)
    offset = 0.5 * (1 / 32 + 1 / 30)
    normal = torch.distributions.Normal(0.0, 1.0)
    upper = normal.icdf(torch.linspace(1 - offset, 0.5, 9, dtype=torch.float64))[:-1]
    lower = -normal.icdf(torch.linspace(1 - offset, 0.5, 8, dtype=torch.float64))[:-1]
    codes = torch.cat([upper, torch.zeros(1, dtype=torch.float64), lower])
    return (codes / codes.max()).sort().values.float()
