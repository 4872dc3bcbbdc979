"""Looking into a pass beside the residual stream: keys, values, and what attention and MLP add to it.

Keys and values are taken where attention hands them to its cache, so that no projection is named: fused,
grouped and normed ones are all handed over there, after rotary positions. Keys before those are what the
block hands over when it is called with the angle zero; that call ends there and leaves nothing behind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preimage.errors import ModelError
from preimage.models.anatomy import block_output
from preimage.models.lifting import entering
from preimage.models.prefix import empty_cache
from preimage.models.quirks import quirk_of
from preimage.observations import Site, Tap

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel

CACHED = ("keys", "values", "kv")
_PARTS = {
    "attention": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "fc2"),
}
_ROTARY = "position_embeddings"  # (cos, sin), as blocks are given them
_PROBE = 5  # tokens on which turning keys back is tried
_ROUNDING = 16  # units of rounding of the largest key, that turning it and back may cost

Reach: TypeAlias = Callable[[Tensor], None]  # takes what was seen; may end the pass


class _Turning(NamedTuple):
    """How keys of a block are turned back: heads of so many coordinates, of which so many are turned."""

    size: int
    turned: int | None  # None: as many as there are angles


_AS_THEY_ARE = _Turning(0, 0)
_turnings: WeakKeyDictionary[LanguageModel, dict[tuple[int, int], _Turning | None]] = WeakKeyDictionary()


class _Handed(Exception):  # noqa: N818  # a signal, not an error
    """Ends a call of a block once it has handed over its keys and values; never leaves this file."""


def depth(tap: Tap) -> float:
    """Where a tap lies on the way up: layer k-1, then the sites of block k, then layer k; "final" last."""
    if isinstance(tap, Site):
        return tap.block - 0.5
    return float("inf") if tap == "final" else float(tap)


def needs_cache(tap: Tap) -> bool:
    """Whether a tap is seen only in a pass that has a cache."""
    return isinstance(tap, Site) and tap.kind in CACHED


@contextmanager
def watching(model: LanguageModel, site: Site, cache: Any, reach: Reach) -> Iterator[None]:
    """While this lasts, a pass gives what it computes at a site to ``reach``."""
    block = model.anatomy.blocks[site.block - 1]
    if site.kind not in CACHED:
        handle = _part(model, block, site.kind).register_forward_hook(_part_hook(reach))
    elif site.rotary == "before":
        hook = _unturned_hook(model, site, cache.layers[site.block - 1], reach)
        handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        layer = cache.layers[site.block - 1]
        with _updating(layer, _storing(layer, lambda *handed: reach(_rows(site, *handed)))):
            yield
        return
    try:
        yield
    finally:
        handle.remove()


def unseen(model: LanguageModel, site: Site) -> ModelError:
    """What is said where a pass came to its end without a site."""
    return ModelError(
        f"Block {site.block} of {type(model.module).__name__} hands no {site.kind} on.",
        "Observe the residual stream, or another block.",
    )


def require_keys(model: LanguageModel) -> None:
    """Refuse a model whose blocks keep something else than keys and values."""
    reason = quirk_of(model.config).no_prefix
    if reason:
        raise ModelError(
            f"{type(model.module).__name__} has no keys and values in every block: {reason}.",
            "Observe the residual stream.",
        )


def unrotated(
    model: LanguageModel, site: Site, keys: Float[Tensor, "*prompt position d"], start: int = 0
) -> Float[Tensor, "*prompt position d"] | None:
    """Keys of a block, or keys beside values, as they were before rotary positions.

    The first of them is at position ``start``. None where the model's own rotation cannot be turned back:
    that is tried, once for a block, on a few tokens.
    """
    known = _turnings.setdefault(model, {})
    if (model.edition, site.block) not in known:
        known[model.edition, site.block] = _turning(model, site.block)
    turning = known[model.edition, site.block]
    if turning is None:
        return None
    width = model.width(Site(site.block, "keys"))
    turned = _turn(model, site.block, turning, keys[..., :width], start)
    return torch.cat([turned, keys[..., width:]], dim=-1) if site.kind == "kv" else turned


def without_positions(model: LanguageModel, tap: Tap) -> Tap:
    """Where a proposer is fitted for a tap: keys before rotary where observed ones can be turned back.

    Rotary turns the same key into another at every position.
    """
    if not _is_turned(tap):
        return tap
    probe = torch.zeros(1, model.width(tap), device=model.device)
    return tap if unrotated(model, tap, probe) is None else tap._replace(rotary="before")


def turned_back(
    model: LanguageModel, tap: Tap, observed: Float[Tensor, "*prompt position d"]
) -> Float[Tensor, "*prompt position d"]:
    """What was seen at a tap, as it is seen at :func:`without_positions`."""
    turned = unrotated(model, tap, observed) if _is_turned(tap) else None
    return observed if turned is None else turned


def _is_turned(tap: Tap) -> TypeGuard[Site]:
    """Whether rotary positions may be in what is seen at a tap."""
    return isinstance(tap, Site) and tap.kind in ("keys", "kv") and tap.rotary == "after"


def _part(model: LanguageModel, block: nn.Module, kind: str) -> nn.Module:
    """The module of a block whose output is added to the stream."""
    children = dict(block.named_children())
    found = next((children[name] for name in _PARTS[kind] if name in children), None)
    name = type(model.module).__name__
    if found is None:
        raise ModelError(f"No {kind} was found in the blocks of {name}.", "Observe the residual stream.")
    if "residual" in inspect.signature(found.forward).parameters:
        raise ModelError(
            f"The {kind} of {name} gives the stream itself, not what is added to it.",
            "Observe the residual stream.",
        )
    return found


def _part_hook(reach: Reach) -> Any:
    return lambda _module, _args, output: reach(block_output(output))


@contextmanager
def _updating(layer: Any, update: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, keys and values go to ``update`` instead of to a layer of a cache."""
    before = layer.__dict__.get("update")
    layer.update = update
    try:
        yield
    finally:
        if before is None:
            del layer.update
        else:
            layer.update = before


def _storing(layer: Any, also: Callable[[Tensor, Tensor], None]) -> Callable[..., Any]:
    """The update of a layer of a cache; what it is given goes to ``also`` too, once it is stored."""
    stored = layer.update

    def update(keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> Any:
        everything = stored(keys, values, *args, **kwargs)
        also(keys, values)
        return everything

    return update


def _rows(site: Site, keys: Tensor, values: Tensor) -> Float[Tensor, "batch position d"]:
    """What is seen at a site of keys and values, batch x heads x position x head: heads side by side."""
    flat = {"keys": keys.transpose(1, 2).flatten(2), "values": values.transpose(1, 2).flatten(2)}
    return torch.cat([flat["keys"], flat["values"]], dim=-1) if site.kind == "kv" else flat[site.kind]


def _unturned_hook(model: LanguageModel, site: Site, layer: Any, reach: Reach) -> Any:
    """Calls a block with the angle zero, before it is called; what it hands over then is stored nowhere."""

    def hook(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        seen: list[Tensor] = []

        def hand_over(keys: Tensor, values: Tensor, *_: object, **__: object) -> None:
            seen.append(_rows(site, keys, values))
            raise _Handed

        with _updating(layer, hand_over), suppress(_Handed):
            block.forward(*args, **_without_angle(model, block, kwargs))
        if not seen:
            raise unseen(model, site)
        reach(seen[0])

    return hook


def _without_angle(model: LanguageModel, block: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a block, its rotary angles set to zero; a model without rotary has none."""
    given = kwargs.get(_ROTARY)
    if given is not None and _is_angle(given):
        cos, sin = given
        return kwargs | {_ROTARY: (torch.ones_like(cos), torch.zeros_like(sin))}
    names = [type(part).__name__ for part in block.modules()]
    if given is not None or "rotary" in " ".join([*names, *vars(_code(block))]).lower():
        raise ModelError(
            f"{type(model.module).__name__} has rotary positions of its own kind.",
            "Observe keys after rotary positions.",
        )
    return kwargs


def _is_angle(given: Any) -> bool:
    return (
        isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(one, Tensor) for one in given)
    )


def _code(block: nn.Module) -> Any:
    """The module of Python that a block's class is from."""
    return sys.modules[type(block).__module__]


def _turning(model: LanguageModel, block: int) -> _Turning | None:
    """How keys of a block are turned back; None where no way gives the keys before rotary."""
    after, before = Site(block, "kv"), Site(block, "kv", "before")
    ids = (torch.arange(_PROBE) % model.vocab_size)[None]
    cache, counted = empty_cache(model.n_layers), model.forward_tokens
    layer, sizes = cache.layers[block - 1], [0]
    try:
        noting = _storing(layer, lambda keys, _: sizes.append(keys.shape[-1]))
        with torch.inference_mode(), _updating(layer, noting):
            seen = model.run(ids, layers=(before, after), cache=cache)
    except ModelError:  # rotary of another kind
        return None
    finally:
        model.forward_tokens = counted
    width = model.width(Site(block, "keys"))
    (keys, values), (wanted, fixed) = (seen[at].tensor_split([width], dim=-1) for at in (after, before))
    if not torch.equal(values, fixed):  # a latent cache holds rotary positions beside its keys
        return None
    allowed = _ROUNDING * torch.finfo(model.dtype).eps * float(wanted.abs().max())
    for turning in (_AS_THEY_ARE, _Turning(sizes[-1], sizes[-1]), _Turning(sizes[-1], None)):
        with suppress(Exception):  # each class has a function of its own, for other shapes, or none
            error = (_turn(model, block, turning, keys, 0) - wanted.float()).abs().max()
            if float(error) <= allowed:
                return turning
    return None


def _turn(model: LanguageModel, block: int, turning: _Turning, keys: Tensor, start: int) -> Tensor:
    """The model's own rotation of keys, by the negative angle."""
    if turning == _AS_THEY_ARE:
        return keys
    rotate = vars(_code(model.anatomy.blocks[block - 1]))["apply_rotary_pos_emb"]
    *prompts, length, width = keys.shape
    cos, sin = (part.float() for part in _angles(model, block, start, length))
    scale = cos.square() + sin.square()  # 1, or the square of what attention scales keys by
    heads = keys.to(cos).reshape(-1, length, width // turning.size, turning.size).transpose(1, 2)
    parts = heads.tensor_split([cos.shape[-1] if turning.turned is None else turning.turned], dim=-1)
    _, turned = rotate(parts[0], parts[0], cos / scale, -sin / scale)
    return torch.cat([turned, parts[1]], dim=-1).transpose(1, 2).reshape(*prompts, length, width)


def _angles(model: LanguageModel, block: int, start: int, length: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines a block is given; the blocks below are passed by."""
    given: list[Any] = []

    def hook(_: nn.Module, __: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given.append(kwargs[_ROTARY])
        raise _Handed

    counted, device = model.forward_tokens, model.device
    empty = torch.zeros(1, length, model.d_model, dtype=model.dtype, device=device)
    handle = model.anatomy.blocks[block - 1].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.inference_mode(), entering(model.anatomy, block - 1, empty), suppress(_Handed):
            model.run(
                embeddings=model.embedding_table[:1].expand(1, length, -1),
                layers=(block,),
                position_ids=torch.arange(start, start + length, device=device)[None],
            )
    finally:
        handle.remove()
        model.forward_tokens = counted
    cos, sin = given[0]
    return cos, sin
