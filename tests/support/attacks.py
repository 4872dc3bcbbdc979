"""A smooth Llama that is tampered with, and what is then said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import preimage
from preimage.models import LanguageModel
from preimage.theory.analyticity.checking import check_analyticity
from support.tiny import build

Attack = Callable[[nn.Module], object]


def verdict(model: LanguageModel) -> tuple[bool | None, list[dict[str, Any]]]:
    report = check_analyticity(model)
    return report.verdicts[0].holds, report.tables["breaks"]


def attacked(attack: Attack) -> tuple[bool | None, list[dict[str, Any]]]:
    model = preimage.load(build("llama", num_hidden_layers=2))
    attack(model.module)
    return verdict(model)


def second(module: Any) -> Any:
    return module.model.layers[1]


class Adapted(nn.Module):
    """A matrix with a low-rank one beside it, as LoRA puts there."""

    def __init__(self, inner: nn.Linear, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function
        self.down = nn.Parameter(torch.randn(2, inner.in_features))
        self.up = nn.Parameter(torch.randn(inner.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.function(x @ self.down.T) @ self.up.T
