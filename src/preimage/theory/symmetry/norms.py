"""Norms, and which modules read them: found by running two tokens, not by names."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from preimage.errors import ModelError
from preimage.models import LanguageModel


@dataclass(frozen=True)
class Affine:
    """A weight, and a bias with the same rows where there is one."""

    weight: Float[Tensor, "*axes"]
    bias: Float[Tensor, "*rows"] | None = None

    def take(self, index: Int[Tensor, " row"]) -> None:
        """Reorder the rows, bias included."""
        self.weight.copy_(self.weight[index])
        if self.bias is not None:
            self.bias.copy_(self.bias[index])


@dataclass(frozen=True, kw_only=True)
class Norm(Affine):
    """gain * x / |x| + bias; the gain is ``weight`` plus ``offset`` (1 in Gemma), a view of the module's."""

    offset: float
    centres: bool  # takes the mean off first: LayerNorm, not RMSNorm

    @property
    def gain(self) -> Float[Tensor, " width"]:
        """What each coordinate is multiplied with."""
        return self.weight + self.offset

    def scale(self, factor: Float[Tensor, " width"]) -> None:
        """Multiply what the norm gives out."""
        self.weight.copy_(self.gain * factor - self.offset)
        if self.bias is not None:
            self.bias.mul_(factor)


@dataclass(frozen=True)
class ObservedPass:
    """What every norm gave out and every module was given in one pass."""

    norms: dict[nn.Module, Tensor]
    inputs: dict[nn.Module, Tensor]

    def feeds(self, norm: nn.Module, module: nn.Module) -> bool:
        """Whether the module's input is the norm's output, the very same memory."""
        given, read = self.norms[norm], self.inputs.get(module)
        return read is not None and (read.data_ptr(), read.numel()) == (given.data_ptr(), given.numel())


def observe_pass(model: LanguageModel) -> ObservedPass:
    """Run two tokens and keep what passes into and out of the modules of every block."""
    observed = ObservedPass({}, {})

    def keep(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if args and isinstance(args[0], Tensor):
            observed.inputs[module] = args[0]
        if "norm" in type(module).__name__.lower() and isinstance(output, Tensor):
            observed.norms[module] = output

    with ExitStack() as hooks:
        for part in (part for block in model.anatomy.blocks for part in block.modules()):
            hooks.enter_context(part.register_forward_hook(keep))
        model.states(torch.tensor([[0, 1]]), (model.n_layers,))
    return observed


def norm_of(module: nn.Module, name: str) -> Norm:
    """A norm module as gain and bias; what its weight means is found by giving it others."""
    own = {key: part.detach() for key, part in module.named_parameters()}
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.ndim != 1 or set(own) - {"weight", "bias"}:
        raise _refusal(module, name)
    x = torch.linspace(1, 2, len(weight)).to(weight)

    def given(gain: float) -> Tensor:
        other = {key: torch.full_like(part, gain if key == "weight" else 0.0) for key, part in own.items()}
        result: Tensor = functional_call(module, other, (x,))
        return result

    offset = float(given(0.0).abs().max() > 0)
    unit = given(1.0 - offset)
    if not torch.allclose(given(3.0 - offset), 3 * unit):
        raise _refusal(module, name)
    return Norm(weight, bias, offset=offset, centres=bool(unit.mean().abs() < 0.1))


def _refusal(module: nn.Module, name: str) -> ModelError:
    known = "LayerNorm and RMSNorm with weights are known."
    return ModelError(f"A {type(module).__name__} of {name} is no norm with a gain.", known)
