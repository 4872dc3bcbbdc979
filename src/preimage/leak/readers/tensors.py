"""Plain tensors: states and caches people saved themselves, training sets of drafts, and preimage's bundles.

Formats: safetensors, npy, npz, and what torch.save wrote of tensors alone. What a tensor is, its name says:
``hidden_states.15``, ``past_key_values.0.key``, ``input_ids``. A file that holds nothing of the kind is left
to other readers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from preimage.errors import StatesError, shown
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.leak.readers.tensors_clear import beside, id_tensors, ids_of_rows, last_part, of_header
from preimage.leak.readers.tensors_source import Named, Source, listed_as_tensors, open_source
from preimage.observations import Observation
from preimage.states import open_states
from preimage.states.scales import is_beside
from preimage.storage import MANIFEST

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN = "unknown"  # the layer of states whose file does not say it, and nobody told
_CACHED = (
    re.compile(r"(?:.*[._/-])?(key|value|k|v)(?:s|_cache|_states)?[._/-]?([0-9]{1,4})", re.IGNORECASE),
    re.compile(
        r"(?:.*[._/-])?([0-9]{1,4})[._/-](?:.*[._/-])?(key|value|k|v)(?:s|_cache|_states)?", re.IGNORECASE
    ),
)
_NUMBERED = re.compile(r"(hidden_states?[._/-]?|layers?[._/-]?)?0*([0-9]{1,9}|final)", re.IGNORECASE)
_FINAL = ("last_hidden_state", "last_hidden_states", "final")
_STATES = ("", "hidden_states", "hidden_state", "states", "activations")
_MASKS = ("attention_mask", "mask")
_BESIDE_STATES = ("loss_mask", "position_ids", "target", "labels", *_MASKS)
# Of a prompt: its states between two positions.
Rows: TypeAlias = "Callable[[int, int, int], Tensor]"


@dataclass(frozen=True)
class _Place:
    """What one tensor, or a part of one, shows: of how many prompts and positions."""

    layer: int | str
    observation: Observation
    prompts: int
    positions: int
    rows: Rows


def read(path: Path, told: Told) -> Holding | None:
    """What a file of tensors or a bundle holds; None where it is neither, or holds no states."""
    if path.is_dir():
        return _bundle(path) if (path / MANIFEST).is_file() else None
    source = open_source(path) if path.is_file() else None
    if source is None:
        return None
    source = listed_as_tensors(path, source, partial(_layers_of, told))
    notes = [
        f"The {shown(name)} was not read: look whether it is token ids, or say the model and the layers."
        for name in source.unread
    ]
    places = list(_cached(path, source, told)) + list(_hidden(path, source, told, notes))
    ids = {name: ids_of_rows(path, name, one, told) for name, one in id_tensors(source).items()}
    if not places and not any(ids.values()):
        return None
    clear, paths, more = beside(path, told)
    clear = [*of_header(source.about.items(), told), *clear]
    pieces = _pieces(path, source, places, ids, clear, notes)
    kind = _kind(source, places, ids)
    about = f"{kind} in a file of {source.kind}, known by the names of its tensors."
    return Holding((path, *paths), kind, about, pieces, tuple(dict.fromkeys([*notes, *more])))


def _layers_of(told: Told, count: int) -> tuple[int | str, ...] | None:
    """Which layers so many tensors are of: those that were told, or all of outputs.hidden_states."""
    if told.layers is not None and len(told.layers) == count:
        return told.layers
    if told.sizes is not None and count == told.sizes.n_layers + 1:
        return (*range(told.sizes.n_layers), "final")
    return None


def _kind(source: Source, places: list[_Place], ids: dict[str, list[tuple[int, ...]]]) -> str:
    if any(last_part(name) == "loss_mask" for name in source.tensors) and ids:
        return "training sample of a draft model"
    if any(one.observation.place in ("keys", "values") for one in places):
        return "transformers cache"
    return "plain states" if places else "token ids"


def _cached(path: Path, source: Source, told: Told) -> Iterator[_Place]:
    """Keys and values by block, [prompt x] heads x position x size of a head."""
    found: dict[tuple[int, str], tuple[str, Named]] = {}
    for name, one in source.tensors.items():
        block = _block_of(name)
        if block is not None and not one.whole and len(one.shape) in (3, 4) and all(one.shape):
            found[block] = (name, one)
    if not found:
        return
    numbers = {block for block, _ in found}
    first = 0 if 0 in numbers or told.sizes is None or max(numbers) < told.sizes.n_layers else 1
    for (number, place), (name, one) in sorted(found.items(), key=lambda item: item[0]):
        heads, positions, size = one.shape[-3:]
        if told.sizes is not None and (heads, size) != (told.sizes.heads, told.sizes.head_size):
            raise StatesError(
                f"{shown(name)} in {path.name} has {heads} heads of {size}; the model has {told.sizes.heads} "
                f"of {told.sizes.head_size}.",
                "Name the model that made it; a cache is prompt x heads x position x size of a head.",
            )
        rotary = told.rotary if place == "keys" and told.rotary else "after"
        prompts = one.shape[0] if len(one.shape) == 4 else 1
        yield _Place(
            number - first + 1, Observation(place, rotary=rotary), prompts, positions, partial(_of_heads, one)
        )


def _block_of(name: str) -> tuple[int, str] | None:
    """The number in the name of a cache's tensor, and whether it is keys or values."""
    for pattern in _CACHED:
        match = pattern.fullmatch(name)
        if match is not None:
            number, word = (match[2], match[1]) if match[2].isdecimal() else (match[1], match[2])
            return int(number), "keys" if word.lower().startswith("k") else "values"
    return None


def _of_heads(one: Named, prompt: int, start: int, stop: int) -> Tensor:
    held = one.rows(prompt, prompt + 1)[0] if len(one.shape) == 4 else one.all()
    return held[:, start:stop].transpose(0, 1).flatten(1)


def _hidden(path: Path, source: Source, told: Told, notes: list[str]) -> Iterator[_Place]:
    """States by name: of a layer that it says, of the final norm, or of one that somebody must tell."""
    usable = {
        name: one
        for name, one in source.tensors.items()
        if _may_be_states(name, one) and _block_of(name) is None
    }
    said = {name: match for name in usable if (match := _NUMBERED.fullmatch(name))}
    numbers = {int(match[2]) for match in said.values() if match[2].isdecimal() and _is_hidden(match)}
    last = max(numbers, default=0)  # of outputs.hidden_states, where they are all there
    if last and len(numbers) <= last:
        last = told.sizes.n_layers if told.sizes is not None else -1
    for name, one in usable.items():
        if name in said:
            number = said[name][2]
            final = not number.isdecimal() or (_is_hidden(said[name]) and int(number) == last > 0)
            yield from _at(path, name, one, "final" if final else int(number), told)
        elif last_part(name) == "aux_hidden_state":
            yield from _for_drafts(one, told, notes)
        elif last_part(name) in _FINAL or (last_part(name) == "hidden_state" and _is_sample(source)):
            yield from _at(path, name, one, "final", told)
        elif last_part(name) in _STATES or len(usable) == 1:
            yield from _unsaid(path, name, one, source, told, notes)


def _is_hidden(match: re.Match[str]) -> bool:
    """Whether a name counts as outputs.hidden_states does, whose last one is after the norm."""
    return match[1] is not None and match[1].lower().startswith("hidden")


def _may_be_states(name: str, one: Named) -> bool:
    return not one.whole and all(one.shape) and last_part(name) not in _BESIDE_STATES and not is_beside(name)


def _is_sample(source: Source) -> bool:
    return any(last_part(name) == "loss_mask" for name in source.tensors)


def _at(path: Path, name: str, one: Named, layer: int | str, told: Told) -> Iterator[_Place]:
    """States of one layer: prompt x position x d, or position x d."""
    if len(one.shape) not in (2, 3):
        return
    width = one.shape[-1]
    if told.sizes is not None and width != told.sizes.d_model:
        raise StatesError(
            f"{shown(name) or 'The array'} in {path.name} has states of {width} numbers; the model has "
            f"{told.sizes.d_model}.",
            "Name the model that made them.",
        )
    prompts = one.shape[0] if len(one.shape) == 3 else 1
    yield _Place(layer, Observation(), prompts, one.shape[-2], partial(_of_states, one))


def _of_states(one: Named, prompt: int, start: int, stop: int) -> Tensor:
    return one.rows(prompt, prompt + 1)[0, start:stop] if len(one.shape) == 3 else one.rows(start, stop)


def _unsaid(
    path: Path, name: str, one: Named, source: Source, told: Told, notes: list[str]
) -> Iterator[_Place]:
    """States whose name says no layer; with four axes, every layer's of outputs.hidden_states."""
    if len(one.shape) == 4:
        layers = _layers_of(told, one.shape[0])
        if layers is None:
            notes.append(f"{shown(name)} has {one.shape[0]} layers: say the model, or which layers.")
        for index, layer in enumerate(layers or ()):
            yield _Place(layer, Observation(), *one.shape[1:3], partial(_of_layers, one, index))
        return
    lengths = {named.shape for named in id_tensors(source).values()}
    if len(one.shape) == 3 and one.shape[0] > 1 and (one.shape[0],) in lengths:
        notes.append(f"{shown(name)} has several layers of every token, which this reader does not read.")
        return
    told_layer = told.layers[0] if told.layers is not None and len(told.layers) == 1 else None
    if told_layer is None:
        notes.append("Which layer the states are of stands nowhere: say it.")
    yield from _at(path, name, one, UNKNOWN if told_layer is None else told_layer, told)


def _of_layers(one: Named, index: int, prompt: int, start: int, stop: int) -> Tensor:
    return one.rows(index, index + 1)[0, prompt, start:stop]


def _for_drafts(one: Named, told: Told, notes: list[str]) -> Iterator[_Place]:
    """Three layers side by side, as EAGLE-3 takes them: a low, a middle and a high one (SpecForge's choice)."""
    sizes = told.sizes
    if sizes is None or len(one.shape) not in (2, 3) or one.shape[-1] != 3 * sizes.d_model:
        notes.append("aux_hidden_state has several layers side by side: name the model to read them.")
        return
    notes.append(
        "The layers of aux_hidden_state stand nowhere: those that SGLang takes by itself are assumed."
    )
    prompts = one.shape[0] if len(one.shape) == 3 else 1
    for index, layer in enumerate((2, sizes.n_layers // 2, sizes.n_layers - 3)):
        columns = slice(index * sizes.d_model, (index + 1) * sizes.d_model)
        yield _Place(layer, Observation(), prompts, one.shape[-2], partial(_of_columns, one, columns))


def _of_columns(one: Named, columns: slice, prompt: int, start: int, stop: int) -> Tensor:
    return _of_states(one, prompt, start, stop)[:, columns]


def _pieces(
    path: Path,
    source: Source,
    places: list[_Place],
    ids: dict[str, list[tuple[int, ...]]],
    clear: list[Clear],
    notes: list[str],
) -> tuple[Piece, ...]:
    rows = max((len(one) for one in ids.values()), default=0)
    prompts = max((one.prompts for one in places), default=rows)
    pieces = []
    for prompt in range(prompts):
        mine = [one for one in places if prompt < one.prompts]
        positions = max((one.positions for one in mine), default=None)
        start, stop = _span(path, source, prompt, positions)
        seen = tuple(
            Seen(
                one.layer, one.observation, partial(one.rows, prompt, start, stop if stop else one.positions)
            )
            for one in mine
        )
        own = [
            Clear(f"the tensor {shown(name)}", token_ids=kept)
            for name, table in ids.items()
            if prompt < len(table) and (kept := _unpadded(table[prompt], start, stop))
        ]
        if prompts == 1:
            own += clear
        name = path.name if prompts == 1 else f"{path.name}, prompt {prompt}"
        length = None if positions is None else (stop or positions) - start
        pieces.append(
            Piece(name, length if seen else len(own[0].token_ids or ()) if own else 0, 0, seen, tuple(own))
        )
    if prompts > 1 and clear:
        pieces.insert(0, Piece(path.name, None, None, clear=tuple(clear)))
    if rows > prompts:
        notes.append(f"It holds the ids of {rows} prompts, and states of {prompts}.")
    return tuple(pieces)


def _unpadded(row: tuple[int, ...], start: int, stop: int | None) -> tuple[int, ...]:
    return tuple(one for one in row[start:stop] if one >= 0)


def _span(path: Path, source: Source, prompt: int, positions: int | None) -> tuple[int, int | None]:
    """Where a prompt lies between the padding that a mask tells of; all of it without one."""
    for name, one in source.tensors.items():
        if last_part(name) not in _MASKS or len(one.shape) != 2 or one.shape[1] != positions:
            continue
        if prompt >= one.shape[0]:
            continue
        kept = one.rows(prompt, prompt + 1)[0].bool().nonzero()[:, 0].tolist()
        if not kept or kept != list(range(kept[0], kept[-1] + 1)):
            raise StatesError(
                f"{shown(name)} in {path.name} leaves prompt {prompt} empty or with holes.",
                "Give a mask that is 1 in one stretch of every prompt.",
            )
        return kept[0], kept[-1] + 1
    return 0, None


def _bundle(path: Path) -> Holding:
    states = open_states(path)
    ids = states.token_ids
    pieces = tuple(
        Piece(
            f"{path.name}, prompt {prompt}",
            states.lengths[prompt] or None,
            0,
            tuple(
                Seen(layer, states.observation, partial(states.at, prompt, layer)) for layer in states.layers
            ),
            () if ids is None else (Clear("the manifest", token_ids=tuple(ids[prompt])),),
        )
        for prompt in range(len(states))
    )
    by = f" by {shown(states.model['name'])}" if states.model else ""
    notes = []
    if ids is None and states.prompts:
        notes.append("Token ids are withheld, but the manifest says where the prompts came from.")
    return Holding(
        (path,), "preimage bundle", f"A bundle of states{by}, known by its manifest.", pieces, tuple(notes)
    )
