"""Session files of llama.cpp: token ids in the clear, then the keys and values of every block.

After the source of llama.cpp that llama-cpp-python 0.3.36 carries (``llama_state_save_file``: magic ggsn,
version 10; ``llama_state_seq_save_file``: magic ggsq, version 3), and of versions 9 and 2 before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from preimage.errors import StatesError, shown
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.leak.readers.llama_cpp_numbers import (
    IN_PAIRS,
    Kept,
    Order,
    keys_in_pairs,
    read_numbers,
    turn_of,
)
from preimage.leak.readers.llama_cpp_state import MOST_CELLS, Stream, find_state
from preimage.leak.readers.raw import is_file
from preimage.observations import Observation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS = {b"nsgg": "session", b"qsgg": "sequence"}  # ggsn and ggsq as little-endian numbers
_NEWEST = {"session": 10, "sequence": 3}  # the one before is read too
_ORDERS = ("pairs", "halves")
_STORED = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "fp16",
    GGMLQuantizationType.BF16: "bf16",
}


@dataclass(frozen=True)
class _File:
    """A file whose header was read, and what is said of it on the way."""

    path: Path
    told: Told
    kind: str
    version: int
    token_ids: tuple[int, ...]  # -1 where there is none: images or sound
    notes: dict[str, None]  # each once, in their order

    def note(self, text: str) -> None:
        self.notes[text] = None

    @property
    def turned(self) -> bool:
        """Whether what was quantised was turned before: since 2026, which version 9 may be of or not."""
        return self.version == _NEWEST[self.kind]


def read(path: Path, told: Told) -> Holding | None:
    """What a session file or a saved sequence holds; None where the file is neither."""
    kind = _kind(path)
    if kind is None:
        return None
    raw = np.memmap(path, np.uint8, mode="r")
    file = _header(path, told, kind, raw)
    architecture, streams = _state(file, raw)
    pieces = tuple(_pieces(file, architecture, streams))
    named = f" of a {architecture} model" if architecture else ""
    about = (
        f"A saved {kind} of llama.cpp, version {file.version}, known by its first bytes: the ids of "
        f"{len(file.token_ids)} tokens in the clear, then the cache{named}."
    )
    return Holding((path,), f"llama.cpp {kind}", about, pieces, tuple(file.notes))


def _kind(path: Path) -> str | None:
    """What its first bytes say; a file that ends right after them is refused."""
    if not is_file(path):
        return None
    with path.open("rb") as file:
        start = file.read(12)
    kind = _KINDS.get(start[:4])
    if kind is not None and len(start) < 12:
        raise StatesError(f"{shown(path.name)} ends within its header.", "It is cut short; copy it again.")
    return kind


def _header(path: Path, told: Told, kind: str, raw: NDArray[np.uint8]) -> _File:
    version, count = (int(value) for value in raw[4:12].view("<u4"))
    if version < _NEWEST[kind] - 1:
        raise StatesError(
            f"{shown(path.name)} is a {kind} of version {version}, which is not read.",
            f"It is damaged, or from before 2025; versions from {_NEWEST[kind] - 1} on are read.",
        )
    room = min((len(raw) - 12) // 4, MOST_CELLS)
    if count > room:
        raise StatesError(
            f"{shown(path.name)} claims {count} token ids, and has room for {room}.",
            "It is cut short or damaged; copy it again.",
        )
    ids = raw[12 : 12 + 4 * count].view("<i4")
    highest = (1 << 24) if told.sizes is None else told.sizes.vocab_size
    if count and (int(ids.min()) < -1 or int(ids.max()) >= highest):
        raise StatesError(
            f"{shown(path.name)} holds token ids from {int(ids.min())} to {int(ids.max())}; the vocabulary "
            f"ends at {highest - 1}.",
            "It is damaged, or of another model; name the model that made it.",
        )
    return _File(path, told, kind, version, tuple(map(int, ids)), {})


def _state(file: _File, raw: NDArray[np.uint8]) -> tuple[str | None, tuple[Stream, ...]]:
    """The architecture and the streams of the cache; no streams where they cannot be read, which is noted."""
    newest = _NEWEST[file.kind]
    if file.version > newest:
        file.note(f"Version {file.version} of these files is not known: the cache was not read.")
        return None, ()
    start = 12 + 4 * len(file.token_ids)
    state = find_state(raw, start, file.kind == "session", file.version == newest)
    if state is None:
        file.note(
            "The cache after the token ids is damaged, cut short, or of a kind that is not read, as that of "
            "recurrent models: keys and values were not read."
        )
        return None, ()
    streams = state.caches[0]
    if len(state.caches) > 1:
        file.note(
            "It holds two caches, one of blocks that see a window alone, and does not say which blocks: keys "
            "and values were not read."
        )
        return state.architecture, ()
    if not all(stream.values for stream in streams):
        file.note("It holds keys without values: a latent cache, or it is cut short. They were not read.")
        return state.architecture, ()
    return state.architecture, streams


def _pieces(file: _File, architecture: str | None, streams: tuple[Stream, ...]) -> Iterator[Piece]:
    """A piece for every sequence; where there are several, or none, one more for the token ids."""
    ids = tuple(one for one in file.token_ids if one >= 0)
    if len(ids) < len(file.token_ids):
        file.note(f"{len(file.token_ids) - len(ids)} tokens have no id: images or sound.")
    clear = (Clear("the header of the file", token_ids=ids),) if ids else ()
    found = [(number, stream) for stream in streams for number in sorted(stream.sequences)]
    if len(found) != 1:
        yield Piece(file.path.name, len(file.token_ids), clear=clear)
    if len(found) > 1:
        file.note(f"It holds {len(found)} sequences, and does not say whose the token ids are.")
    if not found:
        return
    for stream in streams:
        _check_sizes(file, stream)
    order = _order(file, architecture, streams[0])
    for number, stream in found:
        cells = stream.sequences[number]
        at = tuple(map(int, stream.positions[cells]))
        gaps = at != tuple(range(at[0], at[0] + len(at)))
        seen = tuple(_seen(file, stream, cells, order, at if gaps else None))
        alone = len(found) == 1
        name = file.path.name if alone else f"{file.path.name}, sequence {number}"
        yield Piece(name, len(at), 0 if gaps else at[0], seen, clear if alone else ())


def _check_sizes(file: _File, stream: Stream) -> None:
    sizes, widths = file.told.sizes, {one.width for one in (*stream.keys, *stream.values)}
    if sizes is not None and (len(stream.keys) != sizes.n_layers or widths != {sizes.width}):
        held = ", ".join(map(str, sorted(widths)[:4]))
        raise StatesError(
            f"{shown(file.path.name)} holds {len(stream.keys)} blocks of {held} numbers a token; the model "
            f"has {sizes.n_layers} of {sizes.width}.",
            "Name the model that made it.",
        )


def _order(file: _File, architecture: str | None, stream: Stream) -> Order:
    """How coordinates of keys lie in a head: as told, as the architecture's do, or as they look."""
    head = None if file.told.sizes is None else file.told.sizes.head_size
    if file.told.order in _ORDERS:  # others are of other files
        return Order(file.told.order == "pairs", head)
    if architecture is not None:
        return Order(architecture in IN_PAIRS, head)
    if head is None:
        return Order(True, None)  # which leaves keys out, as it must
    pairs = keys_in_pairs(file.path, stream.keys, head, file.turned)
    file.note(
        f"The file does not say how keys lie in a head; they look like {'pairs' if pairs else 'halves'}. "
        "Say order pairs or halves if they are not recovered."
    )
    return Order(pairs, head)


def _seen(
    file: _File, stream: Stream, cells: NDArray[np.int64], order: Order, at: tuple[int, ...] | None
) -> Iterator[Seen]:
    for layer in range(1, len(stream.keys) + 1):
        for place, kept in (("keys", stream.keys[layer - 1]), ("values", stream.values[layer - 1])):
            turn = _turn(file, place, kept, order)
            lie = order if place == "keys" else Order(False, order.head)
            if turn is None or (lie.pairs and lie.head is None):
                file.note(f"To read {place} the size of a head must be known: name the model.")
                continue
            what = Observation(place, stored=_STORED.get(kept.kind), at=at)
            yield Seen(layer, what, partial(read_numbers, file.path, kept, cells, lie, turn))


def _turn(file: _File, place: str, kept: Kept, order: Order) -> int | None:
    """The Hadamard matrix that quantised numbers were turned by; 1: none, None: it cannot be known."""
    if kept.kind in _STORED:
        return 1
    if not file.turned:
        file.note(
            f"{place.capitalize()} are kept as {kept.kind.name}. Versions of llama.cpp from 2026 turn them "
            "before, and this file does not say whether its own did; it was taken as not turned."
        )
        return 1
    if order.head is None:
        return None
    turn = turn_of(place, order.head)
    undone = f", turned before by a Hadamard matrix of {turn}, which is undone" if turn > 1 else ""
    file.note(f"{place.capitalize()} are kept as {kept.kind.name}{undone}.")
    return turn
