"""The difference of two prompts' states as a function of the parameters, in as few numbers as it depends on.

g(theta) = F^l_theta(s) - F^l_theta(s') has a gradient with respect to a matrix W only within the span of the
inputs W is applied to, a few tokens; with respect to a table only in the rows that are looked up. W + A Q
with Q an orthonormal basis of those inputs, and A free, therefore gives the same J J^T and the same shortest
step as W itself, though A is a hundredth of its size: J of a real model becomes a matrix that fits in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from preimage.distances import norms
from preimage.errors import OptionError
from preimage.layers import Layer
from preimage.models import DoubleModel

MEMORY = 4 * 2**30  # bytes, of J
_ROWS = 128  # of J, computed together
_RANK = 1e-13  # singular values below this share of the largest are rounding
Ids: TypeAlias = Sequence[int]


@dataclass(frozen=True)
class _Leaf:
    """Some free numbers: where they start, the tensor a pass reads them from, and how they are written."""

    base: Tensor
    tensor: Tensor
    write: Callable[[Tensor], object]


class Movement:
    """g near the present parameters of a float64 model, whose hooks are in place until ``close``.

    ``only``: a regular expression; parameters of the backbone whose names it is not found in stay as they
    are. A parameter used in several places is moved once.
    """

    def __init__(
        self, model: DoubleModel, first: Ids, second: Ids, layer: Layer, only: str | None = None
    ) -> None:
        self._model, self._prompts, self._layer = model, (tuple(first), tuple(second)), layer
        self._undo: list[Callable[[], object]] = []
        self._leaves: list[_Leaf] = []
        self._tokens: dict[int, int] | None = None  # rows of the shortened table
        self.state_norm = 0.0  # the larger of the two, as last computed
        slopes = self._slopes(only)
        self.names = tuple(slopes)  # of the parameters that may move and that a state depends on
        self._free(slopes)
        self.size = sum(leaf.base.numel() for leaf in self._leaves)

    def difference(self, move: Float[Tensor, " m"] | None = None) -> Float[Tensor, " d"]:
        """g after a move; differentiable where gradients are on."""
        if move is not None:
            with torch.no_grad():
                for leaf, part in zip(self._leaves, self._split(move), strict=True):
                    leaf.tensor.copy_(leaf.base + part)
        first, second = self._states()
        longest = norms(torch.stack([first, second]).detach()).max()
        self.state_norm = max(float(longest), torch.finfo(torch.float64).tiny)
        return first - second

    def jacobian(self) -> Float[Tensor, "d m"]:
        """J at the present parameters."""
        width = self._model.d_model
        if width * self.size * 8 > MEMORY:
            raise OptionError(
                f"J would be {width} x {self.size}, {width * self.size * 8 / 2**30:.1f} GiB.",
                "Use shorter prompts, an earlier layer, or let fewer parameters move (only=...).",
            )
        value = self.difference(torch.zeros(self.size, dtype=torch.float64, device=self._model.device))
        jacobian = value.new_zeros(width, self.size)
        tensors = [leaf.tensor for leaf in self._leaves]
        for rows in torch.arange(width, device=value.device).split(_ROWS):
            seeds = nn.functional.one_hot(rows, width).to(value)
            parts = torch.autograd.grad(value, tensors, seeds, retain_graph=True, is_grads_batched=True)
            jacobian[rows] = torch.cat([part.flatten(1) for part in parts], dim=1)
        return jacobian

    def apply(self, move: Float[Tensor, " m"]) -> None:
        """Write a move into the parameters and take the hooks away."""
        self.close()
        with torch.no_grad():
            for leaf, part in zip(self._leaves, self._split(move), strict=True):
                leaf.write(leaf.base + part)

    def close(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()

    def _states(self) -> list[Float[Tensor, " d"]]:
        """The last state of each prompt."""
        known = self._tokens
        with sdpa_kernel(SDPBackend.MATH):  # plain products, of which gradients can be batched
            rows = [ids if known is None else [known[token] for token in ids] for ids in self._prompts]
            passes = [self._model.run(torch.tensor([row]), layers=(self._layer,)) for row in rows]
        return [states[self._layer][0, -1] for states in passes]

    def _split(self, move: Float[Tensor, " m"]) -> Iterator[Tensor]:
        parts = move.split([leaf.base.numel() for leaf in self._leaves])
        for leaf, part in zip(self._leaves, parts, strict=True):
            yield part.view(leaf.base.shape)

    def _slopes(self, only: str | None) -> dict[str, Tensor]:
        """The gradient of a random combination of both states, of every parameter that may move."""
        named = dict(self._model.anatomy.backbone.named_parameters())
        try:
            pattern = re.compile(only or "")
        except re.error as error:
            raise OptionError(f"only is {only!r}, no regular expression: {error}.", "Mend it.") from error
        chosen = {name: tensor for name, tensor in named.items() if pattern.search(name)}
        if not chosen:
            raise OptionError(
                f"No parameter's name has {only!r} in it.", f"Names are like {next(iter(named))}."
            )
        for tensor in chosen.values():
            tensor.requires_grad_()
        both = torch.cat(self._states())
        seed = torch.randn(both.shape, generator=torch.Generator().manual_seed(0), dtype=both.dtype)
        slopes = torch.autograd.grad(both, list(chosen.values()), seed.to(both.device), allow_unused=True)
        for tensor in chosen.values():
            tensor.requires_grad_(False)
        return {name: slope for name, slope in zip(chosen, slopes, strict=True) if slope is not None}

    def _free(self, slopes: dict[str, Tensor]) -> None:
        """A leaf for every parameter that g depends on."""
        backbone = self._model.anatomy.backbone
        owned = [(module, tensor) for module in backbone.modules() for tensor in module.parameters(False)]
        owners = Counter(id(tensor) for _, tensor in owned)
        inputs = self._inputs(
            [module for module, _ in owned if isinstance(module, nn.Linear) or _flipped(module)]
        )
        for name, slope in slopes.items():
            module = backbone.get_submodule(name.rpartition(".")[0])
            weight = name.endswith("weight") and owners[id(module.weight)] == 1
            if weight and module in inputs:
                self._free_matrix(module, inputs[module])
            elif weight and isinstance(module, nn.Embedding):
                self._free_rows(module, slope)
            else:
                parameter = backbone.get_parameter(name).requires_grad_()
                self._undo.append(partial(parameter.requires_grad_, False))
                self._leaves.append(_Leaf(parameter.detach().clone(), parameter, parameter.data.copy_))

    def _inputs(self, modules: Sequence[nn.Module]) -> dict[nn.Module, Float[Tensor, "token d_in"]]:
        """What each matrix is applied to, over both prompts."""
        seen: dict[nn.Module, list[Tensor]] = {}

        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.setdefault(module, []).append(args[0].detach().flatten(0, -2))

        handles = [module.register_forward_pre_hook(keep) for module in modules]
        with torch.no_grad():
            self.difference()
        for handle in handles:
            handle.remove()
        return {module: torch.cat(rows) for module, rows in seen.items()}

    def _free_matrix(self, module: nn.Module, inputs: Float[Tensor, "token d_in"]) -> None:
        _, sizes, directions = torch.linalg.svd(inputs, full_matrices=False)
        basis = directions[sizes > _RANK * sizes[0]]
        weight: Tensor = module.weight  # type: ignore[assignment]
        width = weight.shape[1 if _flipped(module) else 0]
        free = weight.new_zeros(width, len(basis)).requires_grad_()

        def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            added: Tensor = args[0] @ basis.mT @ free.mT
            return output + added

        def write(value: Tensor) -> None:
            change = value @ basis
            weight.data.add_(change.mT if _flipped(module) else change)

        self._undo.append(module.register_forward_hook(add).remove)
        self._leaves.append(_Leaf(torch.zeros_like(free), free, write))

    def _free_rows(self, module: nn.Embedding, slope: Tensor) -> None:
        """The rows of a table that are used: of the tokens' the tokens', of positions all up to the last."""
        table, padding = module.weight, module.padding_idx
        if module is self._model.anatomy.embedding:
            used = sorted({token for ids in self._prompts for token in ids})
            self._tokens = {token: row for row, token in enumerate(used)}
        else:
            used = list(range(int(slope.any(dim=1).nonzero().max()) + 1))
        rows = torch.tensor(used, device=table.device)

        def restore() -> None:
            module.weight, module.padding_idx = table, padding
            self._tokens = None

        def write(value: Tensor) -> None:
            table.data[rows] = value

        base = table.detach()[rows]
        module.weight, module.padding_idx = nn.Parameter(base.clone()), None  # padding stops gradients
        self._undo.append(restore)
        self._leaves.append(_Leaf(base, module.weight, write))


def _flipped(module: nn.Module) -> bool:
    """Whether a module is GPT-2's matrix, which is stored inputs first."""
    return type(module).__name__ == "Conv1D"
