"""Optimiser steps as differentiable maps of their whole state, and the determinants of their Jacobians.

The state is one vector: the parameters, then whatever moments the optimiser keeps. Write H for the Hessian
(weight decay included where it is part of the gradient) and p for the number of parameters.

Gradient descent: theta' = theta - eta g, so det = det(I - eta H) = product of (1 - eta lambda).
Heavy ball: u' = beta u + g, theta' = theta - eta u'. Adding eta times the row of u' to the row of theta'
leaves (I, 0) there, so det = beta^p.
AdamW: theta' = (1 - eta w) theta + U(m', v') with m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2.
Subtracting dU/dm' and dU/dv' times their rows from the row of theta' leaves ((1 - eta w) I, 0, 0), so
det = (b1 b2 (1 - eta w))^p, wherever v' > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.theory.optimiser.options import KINDS, OptimiserOptions

Gradient: TypeAlias = Callable[[Tensor], Tensor]


def moments(options: OptimiserOptions) -> int:
    """How many vectors the state has beside the parameters."""
    return KINDS.index(options.optimiser)


def update(
    state: Float[Tensor, " n"], gradient: Gradient, step: int, options: OptimiserOptions
) -> Float[Tensor, " n"]:
    """The state after step number ``step`` (the first is 1), as torch.optim computes it."""
    return _UPDATES[options.optimiser](state, gradient, step, options)


def _gradient_descent(state: Tensor, gradient: Gradient, step: int, options: OptimiserOptions) -> Tensor:
    return state - options.learning_rate * (gradient(state) + options.weight_decay * state)


def _heavy_ball(state: Tensor, gradient: Gradient, step: int, options: OptimiserOptions) -> Tensor:
    theta, velocity = state.chunk(2)
    velocity = options.momentum * velocity + (gradient(theta) + options.weight_decay * theta)
    return torch.cat([theta - options.learning_rate * velocity, velocity])


def _adamw(state: Tensor, gradient: Gradient, step: int, options: OptimiserOptions) -> Tensor:
    theta, mean, square = state.chunk(3)
    first, second = options.betas
    slope = gradient(theta)
    mean = first * mean + (1 - first) * slope
    square = second * square + (1 - second) * slope**2
    scale = _root(square) / math.sqrt(1 - second**step) + options.eps
    decayed = (1 - options.learning_rate * options.weight_decay) * theta
    theta = decayed - options.learning_rate / (1 - first**step) * mean / scale
    return torch.cat([theta, mean, square])


def _root(square: Tensor) -> Tensor:
    """The square root with derivative 0 at 0: where a parameter's gradient is 0 throughout, v stays 0."""
    moving = square > 0
    return torch.where(moving, torch.where(moving, square, 1.0).sqrt(), 0.0)


_UPDATES: dict[str, Callable[[Tensor, Gradient, int, OptimiserOptions], Tensor]] = {
    "gradient-descent": _gradient_descent,
    "heavy-ball": _heavy_ball,
    "adamw": _adamw,
}


def predicted_factors(
    options: OptimiserOptions, parameters: int, eigenvalues: Float[Tensor, " p"]
) -> Float[Tensor, " q"]:
    """Numbers whose product is the determinant of a step's Jacobian; only gradient descent needs H."""
    if options.optimiser == "gradient-descent":
        return 1 - options.learning_rate * (eigenvalues + options.weight_decay)
    if options.optimiser == "heavy-ball":
        factor = options.momentum
    else:
        factor = math.prod(options.betas) * (1 - options.learning_rate * options.weight_decay)
    return torch.full((parameters,), factor, dtype=torch.float64)


def torch_optimiser(parameter: Tensor, options: OptimiserOptions) -> torch.optim.Optimizer:
    """The optimiser of torch that ``update`` must agree with."""
    lr, decay = options.learning_rate, options.weight_decay
    if options.optimiser == "adamw":
        return torch.optim.AdamW([parameter], lr, options.betas, options.eps, decay, foreach=False)
    momentum = options.momentum if options.optimiser == "heavy-ball" else 0.0
    return torch.optim.SGD([parameter], lr, momentum, weight_decay=decay, foreach=False)
