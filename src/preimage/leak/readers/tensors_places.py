"""What tensors show of prompts, by their names: hidden states of layers, keys and values of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from preimage.errors import LayerError, StatesError, shown
from preimage.layers import Layer, parse_layer
from preimage.leak.holdings import Sizes, Told
from preimage.leak.readers.plain_text import ID_NAMES
from preimage.leak.readers.tensors_source import Source, last_part
from preimage.observations import Observation
from preimage.states.scales import is_beside
from preimage.states.tensor_input import MASKS, NUMBERED, is_hidden

if TYPE_CHECKING:
    from torch import Tensor

# keys.0, k0, past_key_values.0.key, layers.0.self_attn.k_cache: the last number is the block's.
_CACHED = re.compile(
    r"(?:\A|[._/-])(?P<half>key|value|k|v)(?:s|_cache|_states)?(?:[._/-]?(?P<block>[0-9]{1,4}))?\Z",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?:\A|[._/-])([0-9]{1,4})(?=[._/-]|\Z)")
_LISTED = re.compile(r"(.*)\[([0-9]{1,9})\]", re.DOTALL)
_WEIGHTS = ("weight", "bias", "qweight", "qzeros", "weight_packed", "kernel", "lora_a", "lora_b", "inv_freq")
_FINAL = ("last_hidden_state", "last_hidden_states", "final")
_STATES = ("hidden_states", "hidden_state", "states", "activations")
_NO_STATES = ("loss_mask", "position_ids", "target", "labels", "logits", "loss", *MASKS)
_AUX = "aux_hidden_state"  # three layers side by side, as EAGLE-3 drafts take them
_MOST_PROMPTS = 100_000  # of a tensor; one of a number each takes far more memory than its file
_MOST_LAYERS = 9999
# Of a prompt: what was seen between two of its positions, position x width.
Rows: TypeAlias = "Callable[[int, int, int], Tensor]"


@dataclass(frozen=True)
class Place:
    """What one tensor, or a part of one, shows; ``layer`` is None where nobody says it."""

    layer: Layer | None
    observation: Observation
    lengths: tuple[int, ...]  # positions of every prompt
    rows: Rows


def is_model(source: Source) -> bool:
    """Whether these are the weights of a model: names as modules give them."""
    return any(last_part(name) in _WEIGHTS for name in source.entries)


def is_sample(source: Source) -> bool:
    """Whether it is a training sample of a draft model, which has a mask of what is to be learned."""
    return any(last_part(name) == "loss_mask" for name in source.entries)


def places(source: Source, told: Told, notes: list[str]) -> list[Place]:
    """Everything the tensors of a file show of prompts."""
    return [*_cached(source, told), *_listed(source, told, notes), *_hidden(source, told, notes)]


def _cached(source: Source, told: Told) -> Iterator[Place]:
    """Keys and values by block, [prompt x] heads x position x size of a head."""
    found: dict[tuple[int, str], str] = {}
    for name, entry in source.entries.items():
        block = _block_of(name)
        if block is not None and _has_states(source, name) and len(entry.shape) in (3, 4):
            found.setdefault(block, name)
    numbers = {block for block, _ in found}
    counted = told.sizes is not None and 0 not in numbers and max(numbers, default=0) >= told.sizes.n_layers
    first = 1 if counted else 0
    for (number, place), name in sorted(found.items(), key=lambda item: item[0]):
        shape = source.entries[name].shape
        _require_heads(source, name, shape, number - first, told.sizes)
        rotary = told.rotary if place == "keys" and told.rotary else "after"
        seen = Observation(place, rotary=rotary)
        yield Place(number - first + 1, seen, _lengths(shape, 4), partial(_of_heads, source, name))


def _require_heads(
    source: Source, name: str, shape: tuple[int, ...], block: int, sizes: Sizes | None
) -> None:
    if sizes is None:
        return
    if (shape[-3], shape[-1]) != (sizes.heads, sizes.head_size) or block >= sizes.n_layers:
        raise StatesError(
            f"{shown(name)} in {shown(source.path.name)} has {shape[-3]} heads of {shape[-1]} in block "
            f"{block}, counted from 0; the model has {sizes.heads} of {sizes.head_size} in {sizes.n_layers}.",
            "Name the model that made it; a cache is prompt x heads x position x size of a head.",
        )


def _block_of(name: str) -> tuple[int, str] | None:
    """The number in the name of a cache's tensor, and whether it is keys or values."""
    match = _CACHED.search(name)
    if match is None:
        return None
    numbers = [match["block"]] if match["block"] else _NUMBER.findall(name[: match.start()])
    return (
        (int(numbers[-1]), "keys" if match["half"].lower().startswith("k") else "values") if numbers else None
    )


def _of_heads(source: Source, name: str, prompt: int, start: int, stop: int) -> Tensor:
    one = len(source.entries[name].shape) == 4
    held = source.states(name, prompt, prompt + 1)[0] if one else source.states(name, 0, 1 << 62)
    return held[:, start:stop].transpose(0, 1).flatten(1)


def _listed(source: Source, told: Told, notes: list[str]) -> Iterator[Place]:
    """Lists of tensors: the layers of a pass, prompt x position x d or position x d; or prompts."""
    lists: dict[str, list[tuple[int, str]]] = {}
    for name in source.entries:
        match = _LISTED.fullmatch(name)
        if match is not None and last_part(match[1]) not in _NO_STATES:
            lists.setdefault(match[1], []).append((int(match[2]), name))
    for title, numbered in lists.items():
        names = [name for _, name in sorted(numbered)]
        shapes = [source.entries[name].shape for name in names]
        if not all(_has_states(source, name) and len(source.entries[name].shape) in (2, 3) for name in names):
            continue
        said = f"the list {shown(title)}" if title else "the list"
        layers = _layers_of(told, len(names))
        if layers is not None:
            for layer, name in zip(layers, names, strict=True):
                yield from _at(source, name, layer, told)
        elif all(len(shape) == 2 for shape in shapes) and len(set(shapes)) > 1:
            yield from _prompts(source, names, _only_layer(told, notes), told)
        else:
            notes.append(f"Which layers the {len(names)} tensors in {said} are of stands nowhere: say it.")
            yield Place(None, Observation(), _lengths(shapes[0]), partial(_of_states, source, names[0]))


def _prompts(source: Source, names: list[str], layer: Layer | None, told: Told) -> Iterator[Place]:
    """Prompts of several lengths, each position x d, of one layer."""
    for name in names:
        _require_width(source, name, told.sizes)
    lengths = tuple(source.entries[name].shape[0] for name in names)
    yield Place(layer, Observation(), lengths, lambda prompt, *span: source.states(names[prompt], *span))


def _layers_of(told: Told, count: int) -> tuple[Layer, ...] | None:
    """Which layers so many tensors are of: those that were told, or all of outputs.hidden_states."""
    if told.layers is not None and len(told.layers) == count > 1:
        return tuple(_layer(one, told) for one in told.layers)
    if told.sizes is not None and count == told.sizes.n_layers + 1:
        return (*range(told.sizes.n_layers), "final")
    return None


def _layer(layer: int | str, told: Told) -> Layer:
    return parse_layer(layer, _MOST_LAYERS if told.sizes is None else told.sizes.n_layers)


def _only_layer(told: Told, notes: list[str]) -> Layer | None:
    """The one layer that was told."""
    if told.layers is not None and len(told.layers) == 1:
        return _layer(told.layers[0], told)
    notes.append("Which layer the states are of stands nowhere: say it.")
    return None


def _hidden(source: Source, told: Told, notes: list[str]) -> Iterator[Place]:
    """States by name: of a layer that it says, of the final norm, or of one that somebody must tell."""
    usable = [
        name
        for name, entry in source.entries.items()
        if _has_states(source, name) and len(entry.shape) > 1 and not (_block_of(name) or "[" in name)
        and last_part(name) not in _NO_STATES
    ]  # fmt: skip
    said = {name: match for name in usable if (match := _said(source, name))}
    last = _last(said, told)
    for name in usable:
        if name in said:
            kind, number = said[name].groups()
            layer: Layer = "final"
            if number.isdecimal() and not (is_hidden(kind) and int(number) == last):
                layer = _numbered(source, name, int(number), told)
            if source.kind == "npy":
                notes.append("The layer is taken from the name of the file.")
            yield from _at(source, name, layer, told)
        elif last_part(name) in _FINAL or (last_part(name) == "hidden_state" and is_sample(source)):
            yield from _at(source, name, "final", told)
        elif last_part(name) in (*_STATES, _AUX) or len(usable) == 1:
            yield from _unsaid(source, name, told, notes)


def _said(source: Source, name: str) -> re.Match[str] | None:
    """Whether a name says a layer; a number alone may as well count files."""
    match = NUMBERED.fullmatch(name)
    alone = source.kind == "npy" and match is not None and match[1] is None and match[2].isdecimal()
    return None if alone else match


def _last(said: dict[str, re.Match[str]], told: Told) -> int:
    """The index of the last of outputs.hidden_states, which is after the norm; -1 where that is not there."""
    if told.sizes is not None:
        return told.sizes.n_layers
    numbers = {int(match[2]) for match in said.values() if is_hidden(match[1]) and match[2].isdecimal()}
    return max(numbers) if len(numbers) == max(numbers, default=0) + 1 > 1 else -1


def _numbered(source: Source, name: str, number: int, told: Told) -> Layer:
    try:
        return _layer(number, told)
    except LayerError as error:
        raise StatesError(
            f"{shown(name)} in {shown(source.path.name)}: {error.message}", "Name the model that made it."
        ) from error


def _has_states(source: Source, name: str) -> bool:
    entry = source.entries[name]
    numbers = entry.floats or source.is_coded(name)
    return numbers and all(entry.shape) and not is_beside(name)


def _at(source: Source, name: str, layer: Layer | None, told: Told) -> Iterator[Place]:
    """States of one layer: prompt x position x d, or position x d."""
    shape = source.entries[name].shape
    if len(shape) not in (2, 3):
        return
    _require_width(source, name, told.sizes)
    yield Place(layer, Observation(), _lengths(shape), partial(_of_states, source, name))


def _lengths(shape: tuple[int, ...], batched: int = 3) -> tuple[int, ...]:
    """Positions of every prompt of a tensor, which has prompts where it has ``batched`` axes."""
    return (shape[-2],) * (min(shape[0], _MOST_PROMPTS) if len(shape) == batched else 1)


def _require_width(source: Source, name: str, sizes: Sizes | None) -> None:
    width = source.entries[name].shape[-1]
    if sizes is not None and width != sizes.d_model:
        raise StatesError(
            f"{shown(name)} in {shown(source.path.name)} has states of {width} numbers; the model has "
            f"{sizes.d_model}.",
            "Name the model that made them.",
        )


def _of_states(source: Source, name: str, prompt: int, start: int, stop: int) -> Tensor:
    if len(source.entries[name].shape) == 3:
        return source.states(name, prompt, prompt + 1)[0, start:stop]
    return source.states(name, start, stop)


def _unsaid(source: Source, name: str, told: Told, notes: list[str]) -> Iterator[Place]:
    """States whose name says no layer: of one layer, or of several in one of three ways."""
    shape = source.entries[name].shape
    if len(shape) == 4:  # layer x prompt x position x d
        _require_width(source, name, told.sizes)
        for index, layer in _several(name, shape[0], told, notes):
            yield Place(layer, Observation(), _lengths(shape[1:]), partial(_of_layers, source, name, index))
    elif len(shape) == 3 and _is_by_token(source, shape):  # position x layer x d
        _require_width(source, name, told.sizes)
        for index, layer in _several(name, shape[1], told, notes):
            rows = partial(_of_tokens, source, name, index)
            yield Place(layer, Observation(), (shape[0],), rows)
    elif len(shape) in (2, 3):
        count = _side_by_side(name, shape[-1], told)
        if count == 1:
            yield from _at(source, name, _only_layer(told, notes), told)
            return
        width = shape[-1] // count
        for index, layer in _several(name, count, told, notes):
            columns = slice(index * width, (index + 1) * width)
            yield Place(layer, Observation(), _lengths(shape), partial(_of_columns, source, name, columns))


def _several(name: str, count: int, told: Told, notes: list[str]) -> list[tuple[int, Layer | None]]:
    """The layers of a tensor that has several, by index; just one, not known, where nobody says."""
    layers = _layers_of(told, count)
    if layers is None and last_part(name) == _AUX and count == 3 and told.sizes is not None:
        notes.append(f"The layers of {_AUX} stand nowhere: those that SGLang takes by itself are assumed.")
        low, high = min(2, told.sizes.n_layers), max(1, told.sizes.n_layers - 3)
        layers = (low, told.sizes.n_layers // 2, high)
    if layers is None:
        notes.append(f"{shown(name)} has {count} layers: say the model, and which layers.")
        return [(0, None)]
    return list(enumerate(layers))


def _is_by_token(source: Source, shape: tuple[int, ...]) -> bool:
    """Whether the first axis counts tokens, as ids beside it do, and not prompts."""
    ids = {entry.shape for name, entry in source.entries.items() if last_part(name) in ID_NAMES}
    return shape[0] > 1 and (shape[0],) in ids


def _of_layers(source: Source, name: str, index: int, prompt: int, start: int, stop: int) -> Tensor:
    return source.states(name, index, index + 1)[0, prompt, start:stop]


def _of_tokens(source: Source, name: str, index: int, prompt: int, start: int, stop: int) -> Tensor:
    return source.states(name, start, stop)[:, index]


def _side_by_side(name: str, width: int, told: Told) -> int:
    """How many layers stand side by side in a tensor."""
    if told.sizes is not None:
        count, more = divmod(width, told.sizes.d_model)
        return count if count and not more else 1
    return 3 if last_part(name) == _AUX and width % 3 == 0 else 1


def _of_columns(source: Source, name: str, columns: slice, prompt: int, start: int, stop: int) -> Tensor:
    return _of_states(source, name, prompt, start, stop)[:, columns]
