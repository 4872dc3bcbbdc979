"""Plain tensors: states and caches people saved themselves, and training sets of draft models.

Formats: safetensors, npy, npz, and what torch.save wrote of tensors alone. What a tensor is, its name says:
``hidden_states.15``, ``past_key_values.0.key``, ``input_ids``. Of outputs.hidden_states the last one is
after the final norm; block k of a cache, counted from 0, is layer k + 1. The weights of a model are left
alone, and so is a file that holds nothing of the kind.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from preimage.errors import StatesError, shown
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.leak.readers.plain_text import KIND as PLAIN_TEXT
from preimage.leak.readers.raw import is_file
from preimage.leak.readers.tensors_clear import beside, ids_of_rows, in_the_file
from preimage.leak.readers.tensors_places import Place, is_model, is_sample, places
from preimage.leak.readers.tensors_source import Source, last_part, open_source
from preimage.states.tensor_input import MASKS

if TYPE_CHECKING:
    from torch import Tensor

_MOST_SEEN = 200_000  # what is there of every prompt, times the prompts, in one file
_LARGEST_MASK = 1 << 28  # numbers
_NAMED = 8  # of what was not read


def read(path: Path, told: Told) -> Holding | None:
    """What a file of tensors holds; None where it is none, or holds nothing of prompts."""
    source = open_source(path) if is_file(path) else None
    if source is None or is_model(source):
        return None
    notes = []
    if source.unread:
        some = ", ".join(map(shown, source.unread[:_NAMED]))
        notes.append(f"What is named {some} was not read: look whether it is text or token ids.")
    found = places(source, told, notes)
    ids = ids_of_rows(source, told, notes)
    clear = list(in_the_file(source, told, notes))
    if not found and not ids and not clear:
        return None
    others: list[Path] = []
    if found or ids:
        more, others = beside(path, told, notes)
        clear += more
    kind = _kind(source, found)
    about = f"{kind[0].upper()}{kind[1:]} in a file of {source.kind}, known by the names of its tensors."
    pieces = _pieces(source, found, ids, clear, notes)
    return Holding((path, *others), kind, about, pieces, tuple(dict.fromkeys(notes)))


def _kind(source: Source, found: list[Place]) -> str:
    if not found:
        return PLAIN_TEXT
    if is_sample(source):
        return "training sample of a draft model"
    cached = any(one.observation.place in ("keys", "values") for one in found)
    return "transformers cache" if cached else "plain states"


def _pieces(
    source: Source,
    found: list[Place],
    ids: dict[str, list[tuple[int, ...]]],
    clear: list[Clear],
    notes: list[str],
) -> tuple[Piece, ...]:
    """The prompts of a file, and before them what stands there of all of them together."""
    rows = max(map(len, ids.values()), default=0)
    held = max((len(one.lengths) for one in found), default=rows)
    prompts = min(held, _MOST_SEEN // max(1, len(found) + len(ids)))
    if prompts < held:
        notes.append(f"It holds {held:,} prompts; the first {prompts:,} were taken.")
    elif rows > held:
        notes.append(f"It holds the ids of {rows:,} prompts, and states of {held:,}.")
    spans = _spans(source, max((max(one.lengths) for one in found), default=None))
    names = (
        [source.path.name] if prompts == 1 else [f"{source.path.name}, prompt {i}" for i in range(prompts)]
    )
    pieces = [
        _piece(name, prompt, found, ids, spans, clear if prompts == 1 else [])
        for prompt, name in enumerate(names)
    ]
    if prompts != 1 and clear:
        pieces.insert(0, Piece(source.path.name, None, None, clear=tuple(clear)))
    return tuple(pieces)


def _piece(
    name: str,
    prompt: int,
    found: list[Place],
    ids: dict[str, list[tuple[int, ...]]],
    spans: list[slice],
    clear: list[Clear],
) -> Piece:
    """One prompt: what was seen between its padding, and its ids."""
    span = spans[prompt] if prompt < len(spans) else slice(0, None)
    own = [
        Clear(f"the tensor {shown(title)}", token_ids=kept)
        for title, table in ids.items()
        if prompt < len(table) and (kept := tuple(one for one in table[prompt][span] if one >= 0))
    ]
    mine = [one for one in found if prompt < len(one.lengths)]
    bounds = [span.indices(one.lengths[prompt])[:2] for one in mine]
    seen = tuple(
        Seen(one.layer, one.observation, partial(one.rows, prompt, start, stop))
        for one, (start, stop) in zip(mine, bounds, strict=True)
        if one.layer is not None
    )
    tokens = max((stop - start for start, stop in bounds), default=None)
    if tokens is None and own:
        tokens = len(own[0].token_ids or ())
    return Piece(name, tokens, 0, seen, (*own, *clear))


def _spans(source: Source, positions: int | None) -> list[slice]:
    """Where every prompt lies between the padding that a mask tells of; nothing without a mask."""
    for name, entry in source.entries.items():
        fits = len(entry.shape) == 2 and entry.shape[1] == positions and 0 < entry.size <= _LARGEST_MASK
        if last_part(name) in MASKS and fits:
            return [_span(source, name, prompt, row) for prompt, row in enumerate(source.all(name) != 0)]
    return []


def _span(source: Source, name: str, prompt: int, row: Tensor) -> slice:
    kept = row.nonzero()[:, 0]
    if not len(kept) or int(kept[-1] - kept[0]) + 1 != len(kept):
        raise StatesError(
            f"{shown(name)} in {shown(source.path.name)} leaves prompt {prompt} empty or with holes.",
            "Give a mask that is 1 in one stretch of every prompt.",
        )
    return slice(int(kept[0]), int(kept[-1]) + 1)
