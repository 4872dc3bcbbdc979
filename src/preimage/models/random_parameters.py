"""The same architecture at generic parameters: a point that almost every theta is like.

What is decided by a random draw needs float64 from end to end (see ``doubling``).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from preimage.errors import ModelError
from preimage.models.doubling import DoubleModel, Float64Throughout
from preimage.models.language_model import LanguageModel


def random_parameters(model: LanguageModel, seed: int = 0) -> DoubleModel:
    """A float64 copy on the CPU of the model's architecture, every parameter drawn anew from a Gaussian.

    Embeddings, gains and biases have unit variance, matrices keep the size of what passes through them:
    nothing is left at 0, 1 or any other special value. Tied matrices stay tied. There is no tokenizer: its
    ids mean nothing to these parameters.
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
        return DoubleModel(module, None, name=f"{model.name}, random parameters {seed}")


@torch.no_grad()
def _draw(module: nn.Module, generator: torch.Generator) -> None:
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for parameter in module.parameters():
        whole = parameter.ndim < 2 or id(parameter) in tables
        deviation = 1.0 if whole else 1 / math.sqrt(parameter.shape[-1])
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(noise * deviation)
