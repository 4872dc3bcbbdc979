"""Random parameters of the very module, drawn block by block as a pass comes to them.

For a model too large to be held twice: only what lies outside the blocks, and the block that is running, is
there at any moment. Blocks above the deepest layer that is asked for are never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from preimage.models.anatomy import Anatomy
from preimage.models.float64 import DoubleModel
from preimage.models.language_model import LanguageModel
from preimage.models.random_parameters import copy_module, copying, require_memory, sizes

_HELD = 2 * 2**30  # bytes of blocks that stay once they are drawn
_WIDTH = math.sqrt(3)  # of a uniform density of unit variance; a Gaussian takes four times as long to draw


def draw_by_block(model: LanguageModel, seed: int = 0) -> DoubleModel:
    """A float64 copy of the very backbone, every parameter drawn anew when it is needed.

    As :func:`random_parameters`, on the model's own device where that knows float64 and from uniform
    densities. A pass comes to the same parameters every time. Memory: the embeddings and up to 2 GiB of
    blocks, or one block; refused where that is not free.
    """
    backbone, blocks = model.anatomy.backbone, model.anatomy.blocks
    device = model.device if model.device.type == "cuda" else torch.device("cpu")
    with copying(backbone):
        wanted = sizes(backbone)
        inside = _only_inside(backbone, blocks)
        rest = [place for place in wanted if not any(place in own for own in inside)]
        numbers = [sum(math.prod(wanted[place][0]) for place in places) for places in (rest, *inside)]
        hold = 8 * sum(numbers[1:]) <= _HELD
        require_memory(numbers[0] + (sum if hold else max)(numbers[1:]), device)

        def draw(places: list[int], number: int) -> dict[int, nn.Parameter]:
            generator = torch.Generator(device).manual_seed(1000 * seed + number)
            return {place: _uniform(*wanted[place], generator) for place in places}

        memo: dict[int, Any] = {
            place: nn.Parameter(torch.empty(0, dtype=torch.float64, device=device), requires_grad=False)
            for own in inside
            for place in own
        }
        memo |= draw(rest, 0)
        originals = {id(memo[place]): place for own in inside for place in own}
        module = copy_module(backbone, memo, device)
        for number, (block, own) in enumerate(zip(blocks, inside, strict=True), start=1):
            _Lazily(memo[id(block)], originals, partial(draw, own, number), hold)
        anatomy = _of_the_copy(model.anatomy, memo)
        return DoubleModel(module, None, name=f"{model.name}, random parameters {seed}", anatomy=anatomy)


def release(drawn: DoubleModel) -> None:
    """Give the memory of a copy back now; it is of no more use. Its hooks would keep it for a while."""
    for part in drawn.module.modules():
        part._parameters.clear()


def _only_inside(backbone: nn.Module, blocks: tuple[nn.Module, ...]) -> list[list[int]]:
    """The parameters of each block that nothing else in the backbone has."""
    homes: dict[int, set[int]] = {}
    owner = {id(part): number for number, block in enumerate(blocks) for part in block.modules()}
    for part in backbone.modules():
        for parameter in part.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(owner.get(id(part), -1))
    return [[place for place, at in homes.items() if at == {number}] for number in range(len(blocks))]


def _of_the_copy(anatomy: Anatomy, memo: dict[int, Any]) -> Anatomy:
    """The copy's parts; no pass proves them, because they are those of a module that was proved."""
    return replace(
        anatomy,
        backbone=memo[id(anatomy.backbone)],
        embedding=memo[id(anatomy.embedding)],
        blocks=tuple(memo[id(block)] for block in anatomy.blocks),
        norm=None if anatomy.norm is None else memo[id(anatomy.norm)],
    )


def _uniform(shape: tuple[int, ...], deviation: float, generator: torch.Generator) -> nn.Parameter:
    reach = _WIDTH * deviation
    with torch.inference_mode(False):
        noise = torch.empty(shape, dtype=torch.float64, device=generator.device)
        return nn.Parameter(noise.uniform_(-reach, reach, generator=generator), requires_grad=False)


class _Lazily:
    """Gives a block its parameters when a pass enters it, and takes them when it leaves, unless they stay."""

    def __init__(
        self,
        block: nn.Module,
        originals: dict[int, int],
        draw: Callable[[], dict[int, nn.Parameter]],
        hold: bool,
    ) -> None:
        self._draw, self._hold, self._there = draw, hold, False
        self._places = [
            (part, name, originals[id(parameter)], parameter)
            for part in block.modules()
            for name, parameter in part.named_parameters(recurse=False)
            if id(parameter) in originals
        ]
        block.register_forward_pre_hook(self._enter, prepend=True)  # before any hook that reads parameters
        block.register_forward_hook(self._leave, always_call=True)  # also where a pass ends in the block

    def _enter(self, *_: object) -> None:
        if not self._there:
            drawn = self._draw()
            for part, name, place, _empty in self._places:
                part._parameters[name] = drawn[place]
            self._there = True

    def _leave(self, *_: object) -> None:
        if not self._hold:
            for part, name, _place, empty in self._places:
                part._parameters[name] = empty
            self._there = False
