"""Finding embedding, blocks and final norm in any decoder-only transformers module.

No table of architecture names: the block list is found by its length, and one two-token pass proves that
what was found is what runs (each block once, in order, each fed by the one before).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from preimage.errors import ModelError
from preimage.models.offloaded import device_of


@dataclass(frozen=True)
class Anatomy:
    """The parts of a decoder-only model that the layer map needs."""

    backbone: nn.Module  # token ids or embeddings -> last_hidden_state; no LM head
    embedding: nn.Module
    blocks: tuple[nn.Module, ...]
    norm: nn.Module | None  # None where the backbone ends with its last block
    d_model: int
    blocks_return_tuples: bool


def discover(module: nn.Module) -> Anatomy:
    """Map a transformers module, or refuse it by name before any work is done."""
    name = type(module).__name__
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise _refusal(name, "it is not a transformers model")
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, "it is an encoder-decoder")
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not count:
        raise _refusal(name, "its config names no num_hidden_layers")
    backbone, blocks = _find_blocks(module, int(count), name)
    embedding = backbone.get_input_embeddings()  # type: ignore[operator]  # PreTrainedModel's
    if not isinstance(embedding, nn.Module) or not hasattr(embedding, "num_embeddings"):
        raise _refusal(name, "it has no table of token embeddings")
    return _probe(backbone, embedding, blocks, name)


def block_output(output: object) -> Tensor:
    """The hidden states a block returned: a tensor in new transformers, the head of a tuple in old."""
    return output[0] if isinstance(output, tuple) else output  # type: ignore[return-value]


def block_input(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """The hidden states a block was called with."""
    return args[0] if args else kwargs["hidden_states"]  # type: ignore[return-value]


def _find_blocks(module: nn.Module, count: int, name: str) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The shallowest list of ``count`` modules, and the model that owns it."""
    lists = [
        (path.count("."), path)
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    for _, path in sorted(lists):
        owner = module.get_submodule(path.rpartition(".")[0])
        if hasattr(owner, "get_input_embeddings"):
            return owner, tuple(module.get_submodule(path))  # type: ignore[arg-type]
    raise _refusal(name, f"no list of {count} blocks was found in it")


@torch.no_grad()
def _probe(backbone: nn.Module, embedding: nn.Module, blocks: tuple[nn.Module, ...], name: str) -> Anatomy:
    """Run two tokens and compare what the blocks saw with what the map says they see."""
    seen: list[tuple[int, Tensor, Tensor]] = []
    kinds: set[bool] = set()

    def record(index: int) -> object:
        def hook(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            seen.append((index, block_input(args, kwargs).clone(), block_output(output).clone()))
            kinds.add(isinstance(output, tuple))

        return blocks[index].register_forward_hook(hook, with_kwargs=True)

    handles = [record(index) for index in range(len(blocks))]
    ids = torch.tensor([[0, 1]], device=device_of(embedding))
    try:
        last = backbone(ids, use_cache=False).last_hidden_state
    except Exception as error:
        raise _refusal(name, f"a two-token pass failed ({error})") from error
    finally:
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]
    if [index for index, _, _ in seen] != list(range(len(blocks))):
        raise _refusal(name, "its blocks do not run once each, in order")
    for (_, _, output), (_, following, _) in pairwise(seen):
        if not torch.equal(output, following):
            raise _refusal(name, "a block is not fed by the one before it")
    top = seen[-1][2]
    norm = _find_norm(backbone, top, last)
    return Anatomy(backbone, embedding, blocks, norm, top.shape[-1], blocks_return_tuples=True in kinds)


def _find_norm(backbone: nn.Module, top: Tensor, last: Tensor) -> nn.Module | None:
    """The child that turns the last block's output into ``last_hidden_state``, if one does."""
    for child in backbone.children():
        if "norm" in type(child).__name__.lower() and torch.equal(child(top).to(last.device), last):
            return child
    return None


def _refusal(name: str, reason: str) -> ModelError:
    return ModelError(
        f"{name} cannot be mapped: {reason}.",
        "preimage needs a decoder-only transformers model; `preimage models` lists what is tested.",
    )
