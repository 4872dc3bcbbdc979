"""Starting a forward pass in the middle: from the states of one layer to those of any layer above.

Every position of a layer determines every position of the layers above, so states that were observed at one
layer can be carried on by the model's own blocks. The blocks below are passed by, not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from preimage.layers import Layer
from preimage.models.anatomy import Anatomy


@contextmanager
def entering(anatomy: Anatomy, layer: Layer, states: Tensor) -> Iterator[None]:
    """While this lasts, a pass over as many positions has ``states`` at ``layer``, whatever is put in."""
    blocks = anatomy.blocks
    number = len(blocks) if layer == "final" else layer
    with ExitStack() as stack:
        if layer == "final" and anatomy.norm is not None:
            stack.enter_context(_replaced(anatomy.norm, states, last=True, in_tuple=False))
        for index, block in enumerate(blocks[:number]):
            stack.enter_context(_replaced(block, states, index == number - 1, anatomy.blocks_return_tuples))
        if number == 0:
            handle = blocks[0].register_forward_pre_hook(_given(states), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _given(states: Tensor) -> Any:
    def hook(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if args:
            return (states, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": states}

    return hook


@contextmanager
def _replaced(block: nn.Module, states: Tensor, last: bool, in_tuple: bool) -> Iterator[None]:
    """A block that hands on what it is given, or, the last one passed by, ``states``."""

    def forward(hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        out = states if last else hidden_states
        return (out,) if in_tuple else out

    before = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = before
