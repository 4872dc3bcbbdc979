"""The same architecture at generic parameters: a point that almost every theta is like.

transformers asks for float32 inside norms, rotary angles and softmax whatever the model's type is, which
leaves rounding of 1e-7 in a float64 model. What is decided by a random draw needs float64 throughout, so a
copy made here runs with every request for float32 read as one for float64.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from preimage.errors import ModelError
from preimage.models.language_model import LanguageModel


class Float64Throughout(TorchFunctionMode):
    """While it is entered, whatever asks torch for float32 gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` with float64 in the place of float32."""
        if func is Tensor.float:
            func = Tensor.double
        widened = {key: _wider(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **widened)


def random_parameters(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """A float64 copy on the CPU of the model's architecture, every parameter drawn anew from a Gaussian.

    Embeddings, gains and biases have unit variance, matrices keep the size of what passes through them:
    nothing is left at 0, 1 or any other special value. Tied matrices
    stay tied. There is no tokenizer: its ids mean nothing to these parameters.
    """
    config: Any = copy.deepcopy(model.module.config)
    config._attn_implementation = config._experts_implementation = "eager"  # plain products, in any type
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the copy's parameters are real numbers
    kind = type(model.module)
    with Float64Throughout():
        try:
            module = kind(config).double().requires_grad_(False).eval()
        except Exception as error:  # many kinds, one line
            raise ModelError(
                f"{kind.__name__} cannot be built from its config alone: {error}",
                "Give a transformers model whose class takes nothing but its config.",
            ) from error
        _draw(module, torch.Generator().manual_seed(seed))
        _run_in_float64(module)
        return LanguageModel(module, None, name=f"{model.name}, random parameters {seed}")


@torch.no_grad()
def _draw(module: nn.Module, generator: torch.Generator) -> None:
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for parameter in module.parameters():
        whole = parameter.ndim < 2 or id(parameter) in tables
        deviation = 1.0 if whole else 1 / math.sqrt(parameter.shape[-1])
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise * deviation)


def _run_in_float64(module: nn.Module) -> None:
    """Let every forward of the module and of its parts that are models of their own ask for float64."""
    for part in module.modules():
        if hasattr(part, "get_input_embeddings"):
            part.forward = _in_float64(part.forward)


def _in_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Float64Throughout():
            return forward(*args, **kwargs)

    return run


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
