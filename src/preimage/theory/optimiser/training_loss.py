"""The language-model loss as a function of one vector of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from preimage.errors import ModelError, PromptError
from preimage.models import LanguageModel, in_double

_ROWS = 128  # of a Jacobian, computed together


class TrainingLoss:
    """Mean next-token cross-entropy of some prompts, by a float64 model; tied parameters count once.

    The module's own ``labels`` argument is not used: transformers casts the logits to float32 there.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Sequence[int]]) -> None:
        if model.unembedding is None:
            raise ModelError(f"{model.name} has no LM head.", "Load it with its head: the loss needs logits.")
        short = next((ids for ids in prompts if len(ids) < 2), None)
        if short is not None or not prompts:
            raise PromptError(
                f"Prompt {list(short or ())} has no token to predict.", "Give prompts of at least two tokens."
            )
        self.module: nn.Module = model.module
        named = dict(self.module.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in named.items()}
        self.start: Float[Tensor, " p"] = torch.cat([p.detach().flatten() for p in named.values()])
        by_length: dict[int, list[Sequence[int]]] = {}
        for ids in prompts:
            by_length.setdefault(len(ids), []).append(ids)
        self.batches = [torch.tensor(group, device=model.device) for group in by_length.values()]
        self.predicted = sum(len(ids) - 1 for ids in prompts)

    def __call__(self, theta: Float[Tensor, " p"]) -> Float[Tensor, ""]:
        """The loss at ``theta``, differentiable."""
        parameters = dict(self._split(theta))
        with in_double():
            losses = [self._batch(parameters, ids) for ids in self.batches]
        return torch.stack(losses).sum() / self.predicted

    def gradient(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """The gradient at ``theta``, differentiable itself where ``theta`` requires it."""
        differentiable = theta.requires_grad
        at = theta if differentiable else theta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self(at), at, create_graph=differentiable)
        return slope

    def hessian(self, theta: Float[Tensor, " p"]) -> Float[Tensor, "p p"]:
        """The dense Hessian, made symmetric to the bit."""
        hessian = jacobian(self.gradient, theta)
        return (hessian + hessian.mT) / 2

    def _split(self, theta: Float[Tensor, " p"]) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, shape in self._shapes.items():
            yield name, theta[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def _batch(self, parameters: dict[str, Tensor], ids: Int[Tensor, "prompt position"]) -> Tensor:
        output = functional_call(self.module, parameters, (), {"input_ids": ids, "use_cache": False})
        return cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def jacobian(function: Callable[[Tensor], Tensor], at: Float[Tensor, " n"]) -> Float[Tensor, "m n"]:
    """The Jacobian of a map between vectors, row by row, by autograd."""
    point = at.detach().requires_grad_()
    value = function(point)
    rows = torch.eye(len(value), dtype=value.dtype, device=value.device).split(_ROWS)
    parts = [
        torch.autograd.grad(value, point, some, retain_graph=True, is_grads_batched=True)[0] for some in rows
    ]
    return torch.cat(parts).detach()
