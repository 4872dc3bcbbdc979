"""The weights of a decoder by what they do: queries, keys, values, units, norms.

Every tensor is a view of the module's own storage, so that writing one changes the model. Layouts are known
by the names of the linear maps; which maps read which norm is found by a two-token pass. A block with a
parameter that is not understood is refused by that parameter's name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.errors import ModelError
from preimage.models import LanguageModel
from preimage.theory.symmetry.norms import Affine, Norm, ObservedPass, norm_of, observe_pass

_ATTENTION = ("self_attn", "attn", "attention")
_SPLIT = ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense")
_UNITS = (("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"), ("fc1", "fc2"))


@dataclass(frozen=True)
class Map(Affine):
    """A linear map: axes (…, d_model) where it reads the residual stream, (d_model, …) where it writes."""

    def act(self, matrices: Float[Tensor, "head out out"]) -> None:
        """Let each head's matrix act on what the map gives out for that head."""
        self.weight.copy_(matrices @ self.weight)
        if self.bias is not None:
            self.bias.copy_((matrices @ self.bias[..., None])[..., 0])


@dataclass(frozen=True)
class Units:
    """An MLP: ``gate`` is None where it is not gated. A mixture of experts has one for each expert."""

    gate: Map | None
    up: Map
    down: Map


@dataclass(frozen=True)
class BlockWeights:
    """One block. Queries are (head, head_dim, d_model), keys and values (group, head_dim, d_model)."""

    query: Map
    key: Map
    value: Map
    output: Map  # (d_model, head, head_dim)
    query_norm: Norm | None
    key_norm: Norm | None
    units: tuple[Units, ...]
    router: Map | None
    read_norms: tuple[tuple[Norm, tuple[Map, ...]], ...]  # each with every map that reads it, and no other
    post_norms: tuple[Norm, ...]  # what they give is added to the residual stream

    @property
    def readers(self) -> tuple[Map, ...]:
        """Every map whose input is the residual stream, normed or not."""
        mlp = [part for units in self.units for part in (units.gate, units.up) if part is not None]
        return (self.query, self.key, self.value, *mlp, *([self.router] if self.router else []))

    @property
    def writers(self) -> tuple[Map, ...]:
        """Every map whose output is added to the residual stream, normed or not."""
        return (self.output, *(units.down for units in self.units))


@dataclass(frozen=True)
class Weights:
    """``planes``: the two coordinates of a head that each rotary frequency turns; None where none does."""

    embeddings: tuple[Float[Tensor, "_ d_model"], ...]  # tokens, and absolute positions if any
    blocks: tuple[BlockWeights, ...]
    final: Norm | None
    planes: Int[Tensor, "plane 2"] | None


def read_weights(model: LanguageModel) -> Weights:
    """Views of a model's weights, or a refusal that names what is not understood."""
    anatomy = model.anatomy
    observed = observe_pass(model)
    blocks = tuple(_Reader(model, observed, index).read() for index in range(model.n_layers))
    tables = [part for part in anatomy.backbone.modules() if isinstance(part, nn.Embedding)]
    known = {id(p) for part in (*tables, *anatomy.blocks) for p in part.parameters()}
    final = None if anatomy.norm is None else norm_of(anatomy.norm, model.name)
    known |= set() if anatomy.norm is None else {id(p) for p in anatomy.norm.parameters()}
    _require_known(model, anatomy.backbone, known)
    if any(table.weight.shape[1] != model.d_model for table in tables):
        raise _refusal(model, "its embeddings are not as wide as its residual stream")
    planes = _planes(model, blocks[0].query.weight.shape[1])
    if planes is None and len(tables) < 2:
        raise _refusal(model, "its positions are neither rotary nor a table of embeddings")
    return Weights(tuple(table.weight.detach() for table in tables), blocks, final, planes)


class _Reader:
    """Reads one block, and keeps count of the parameters it has understood."""

    def __init__(self, model: LanguageModel, observed: ObservedPass, index: int) -> None:
        self.model, self.observed = model, observed
        self.block = model.anatomy.blocks[index]
        self.known: set[int] = set()
        self.reads: list[tuple[nn.Module, tuple[Map, ...]]] = []  # modules fed by the stream, as maps
        config = model.module.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
        self.heads = int(getattr(config, "num_attention_heads", None) or 0)
        self.groups = int(getattr(config, "num_key_value_heads", None) or self.heads)

    def read(self) -> BlockWeights:
        """The block's weights by what they do."""
        if getattr(self.block, "do_layer_norm_before", True) is False:
            raise _refusal(self.model, "its norms stand on the residual stream itself")
        query, key, value, output, query_norm, key_norm = self._attention()
        units, router = self._mlp()
        read, post = [], []
        for part in (part for part in self.block.children() if part in self.observed.norms):
            maps = [m for module, readers in self.reads if self.observed.feeds(part, module) for m in readers]
            norm = self._norm(part)
            if maps:
                read.append((norm, tuple(maps)))
            else:
                post.append(norm)
        _require_known(self.model, self.block, self.known)
        return BlockWeights(
            query, key, value, output, query_norm, key_norm, units, router, tuple(read), tuple(post)
        )

    def _attention(self) -> tuple[Map, Map, Map, Map, Norm | None, Norm | None]:
        attention = _child(self.block, _ATTENTION)
        if attention is None or not self.heads:
            raise _refusal(self.model, f"its attention is none of {', '.join(_ATTENTION)}")
        out = _child(attention, _OUTPUTS)
        if out is None:
            raise _refusal(self.model, f"the output of its attention is none of {', '.join(_OUTPUTS)}")
        flat = self._map(out)
        width = flat.weight.shape[1] // self.heads
        output = Map(flat.weight.unflatten(1, (self.heads, width)), flat.bias)
        query, key, value = self._queries(attention, width)
        shapes = [tuple(part.weight.shape[:2]) for part in (query, key, value)]
        if shapes != [(self.heads, width), (self.groups, width), (self.groups, width)]:
            plain = f"queries, keys and values of shapes {shapes} are not those of plain heads"
            raise _refusal(self.model, plain)
        norms = [_child(attention, (name,)) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if norm is None else self._norm(norm) for norm in norms)
        return query, key, value, output, query_norm, key_norm

    def _queries(self, attention: nn.Module, width: int) -> tuple[Map, ...]:
        """Three maps (Llama), or one: part after part (GPT-2, Phi-3) or head after head (GPT-NeoX)."""
        if all(hasattr(attention, name) for name in _SPLIT):
            modules = [getattr(attention, name) for name in _SPLIT]
            parts = tuple(_rows(self._map(module), (-1, width)) for module in modules)
            self.reads += [(module, (part,)) for module, part in zip(modules, parts, strict=True)]
            return parts
        module = _child(attention, ("c_attn", "qkv_proj"))
        if module is not None:
            whole = _rows(self._map(module), (-1, width))
            sizes = [self.heads, self.groups, self.groups]
            if whole.weight.shape[0] != sum(sizes):
                raise _refusal(self.model, "its fused queries, keys and values are not one after another")
            parts = _cut(whole, lambda rows: rows.split(sizes))
        else:
            module = _child(attention, ("query_key_value",))
            if module is None or self.heads != self.groups:
                raise _refusal(self.model, "its queries, keys and values are in no layout that is known")
            parts = _cut(_rows(self._map(module), (self.heads, 3, width)), lambda rows: rows.unbind(1))
        self.reads.append((module, parts))
        return parts

    def _mlp(self) -> tuple[tuple[Units, ...], Map | None]:
        mlp = _child(self.block, ("mlp",)) or self.block
        experts = _child(mlp, ("experts",))
        if experts is not None:
            return self._experts(mlp, experts)
        fused = _child(mlp, ("gate_up_proj",))
        if hasattr(mlp, "down_proj") and (fused is not None or hasattr(mlp, "gate_proj")):
            if fused is not None:
                gate, up = _cut(_rows(self._map(fused), (2, -1)), lambda rows: rows.unbind(0))
                self.reads.append((fused, (gate, up)))
            else:
                gate, up = self._map(mlp.gate_proj), self._map(mlp.up_proj)
                self.reads += [(mlp.gate_proj, (gate,)), (mlp.up_proj, (up,))]  # type: ignore[list-item]
            return (Units(gate, up, self._map(mlp.down_proj)),), None
        for first, second in _UNITS:
            if hasattr(mlp, first) and hasattr(mlp, second):
                up = self._map(getattr(mlp, first))
                self.reads.append((getattr(mlp, first), (up,)))
                return (Units(None, up, self._map(getattr(mlp, second))),), None
        raise _refusal(self.model, "its MLP is in no layout that is known")

    def _experts(self, mlp: nn.Module, experts: nn.Module) -> tuple[tuple[Units, ...], Map | None]:
        """Experts kept in one tensor each for gate and up, and for down (Mixtral)."""
        router = _child(mlp, ("gate", "router"))
        both, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
        if router is None or not isinstance(both, nn.Parameter) or not isinstance(down, nn.Parameter):
            raise _refusal(self.model, "its experts are in no layout that is known")
        self.known |= {id(both), id(down)}
        halves = both.detach().unflatten(1, (2, -1))
        units = tuple(Units(Map(h[0]), Map(h[1]), Map(d)) for h, d in zip(halves, down.detach(), strict=True))
        routing = self._map(router)
        read = tuple(part for one in units for part in (one.gate, one.up) if part is not None)
        self.reads += [(router, (routing,)), (experts, read)]
        return units, routing

    def _map(self, module: object) -> Map:
        """A linear module as (out, in); transformers' Conv1D keeps (in, out)."""
        assert isinstance(module, nn.Module)
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            raise _refusal(self.model, f"a {type(module).__name__} holds no plain matrix")
        self.known |= {id(part) for part in (weight, bias) if part is not None}
        matrix = weight.detach()
        turned = matrix.T if type(module).__name__ == "Conv1D" else matrix
        return Map(turned, None if bias is None else bias.detach())

    def _norm(self, module: nn.Module) -> Norm:
        self.known |= {id(part) for part in module.parameters()}
        return norm_of(module, self.model.name)


def _rows(whole: Map, shape: tuple[int, ...]) -> Map:
    """The same map with its rows in several axes."""
    bias = None if whole.bias is None else whole.bias.unflatten(0, shape)
    return Map(whole.weight.unflatten(0, shape), bias)


def _cut(whole: Map, cut: Callable[[Tensor], Sequence[Tensor]]) -> tuple[Map, ...]:
    """A map cut into several, its bias in the same way."""
    weights = cut(whole.weight)
    biases = [None] * len(weights) if whole.bias is None else cut(whole.bias)
    return tuple(Map(weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _planes(model: LanguageModel, head_dim: int) -> Int[Tensor, "plane 2"] | None:
    """Which coordinates turn together, read off the architecture's own ``rotate_half``."""
    named = model.anatomy.backbone.named_buffers()
    widths = {2 * len(buffer) for name, buffer in named if name.endswith("inv_freq")}
    if not widths:
        return None
    attention = _child(model.anatomy.blocks[0], _ATTENTION)
    rotate = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    if rotate is None or len(widths) > 1 or max(widths) > head_dim:
        raise _refusal(model, "its rotary positions are in no layout that is known")
    turned = rotate(torch.arange(1.0, widths.pop() + 1))  # x_i becomes -x_j, and x_j becomes x_i
    first = (turned < 0).nonzero().flatten()
    return torch.stack([first, (-turned[first]).long() - 1], dim=1)


def _child(owner: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    children = [getattr(owner, name) for name in names if isinstance(getattr(owner, name, None), nn.Module)]
    return children[0] if children else None


def _require_known(model: LanguageModel, owner: nn.Module, known: set[int]) -> None:
    for name, parameter in owner.named_parameters():
        if id(parameter) not in known:
            raise _refusal(model, f"what its parameter {name} does is not known")


def _refusal(model: LanguageModel, reason: str) -> ModelError:
    known = "Models laid out like Llama, GPT-2, GPT-NeoX, OPT, Phi-3 or Mixtral can be read."
    return ModelError(f"The weights of {type(model.module).__name__} cannot be read: {reason}.", known)
