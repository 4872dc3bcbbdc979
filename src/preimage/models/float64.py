"""A copy of a model that computes in float64 from end to end.

A transformers module cast to float64 is not enough: its norms, rotary positions and eager softmax name
float32 and round to seven digits in every block. The copy here reads float64 wherever they say float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from preimage.errors import ModelError
from preimage.models.language_model import LanguageModel
from preimage.models.offloaded import require_in_memory


class Float64Throughout(TorchFunctionMode):
    """While it is entered, whatever asks torch for float32 gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with float64 in the place of float32."""
        if func is Tensor.float:
            func = Tensor.double
        named = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **named)


@contextmanager
def in_double() -> Iterator[None]:
    """Passes inside are float64 throughout, and twice differentiable: attention is plain products."""
    with sdpa_kernel(SDPBackend.MATH), Float64Throughout():
        yield


class DoubleModel(LanguageModel):
    """The layer maps F^l in float64; numbers differ from plain transformers by its float32 rounding."""

    _around_pass = Float64Throughout


def double_copy(model: LanguageModel, *, head: bool = False) -> DoubleModel:
    """A float64 copy of a model's backbone; the model itself is not touched. Cost: its weights once more.

    ``head``: copy what is above the backbone too, for a loss or for a model to keep; ties are kept.
    """
    copied = model.module if head else model.anatomy.backbone
    require_in_memory(copied)
    for name, parameter in copied.named_parameters():
        if not parameter.is_floating_point():
            raise ModelError(
                f"{name} of {model.name} is stored as {parameter.dtype} and has no float64 copy.",
                "Load the model without quantisation.",
            )
    module = copy.deepcopy(copied).to(torch.float64).requires_grad_(False)
    if hasattr(module, "set_experts_implementation"):
        module.set_experts_implementation("eager")  # type: ignore[operator]  # grouped products know no float64
    return DoubleModel(module, model.tokenizer, name=model.name, revision=model.revision)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
