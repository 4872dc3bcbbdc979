"""Distances by direct float64 differences: the definition, and the reference for everything faster.

|x|^2 + |y|^2 - 2 x.y is never used: in float32 it reports 0 for states that are apart.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def row_distances(x: Float[Tensor, "*rows d"], y: Float[Tensor, "*other d"]) -> Float[Tensor, "*result"]:
    """|x_i - y_i|_2 in float64; leading axes broadcast."""
    difference = x.to(torch.float64) - y.to(torch.float64)
    return norms(difference)


def norms(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
    """|x_i|_2 in float64."""
    result: Tensor = torch.linalg.vector_norm(x.to(torch.float64), dim=-1)
    return result
