"""The map of a model in float64 throughout.

Most transformers classes compute norms, softmax and rotary angles in float32 whatever the parameters' type: a
float64 Llama is accurate to 1e-8 only. Verdicts of the theory need the map itself, so these casts are lifted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from preimage.models import LanguageModel


class _NoSingle(TorchFunctionMode):
    """Turns every request for float32 inside a pass into one for float64."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    """Passes inside are float64 throughout, and twice differentiable: attention is plain products."""
    with sdpa_kernel(SDPBackend.MATH), _NoSingle():
        yield


def double_copy(model: LanguageModel) -> LanguageModel:
    """The same model with float64 parameters of its own; ties between them are kept."""
    module = copy.deepcopy(model.module).to(torch.float64).requires_grad_(False)
    return LanguageModel(module, model.tokenizer, name=model.name, revision=model.revision)
