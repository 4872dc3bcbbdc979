"""Session files of llama.cpp: token ids in the clear, then the keys and values of every block.

After the source of llama.cpp that llama-cpp-python 0.3.36 carries (``llama_state_save_file``: magic ggsn,
version 10; ``llama_state_seq_save_file``: magic ggsq, version 3), and of versions 9 and 2 before them. No
length is written of what follows the token ids: it is believed where one layout accounts for every byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from preimage.errors import StatesError, shown
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Told
from preimage.leak.readers.llama_cpp_numbers import (
    AS_THEY_ARE,
    IN_PAIRS,
    Kept,
    Order,
    keys_in_pairs,
    read_numbers,
    turn_of,
)
from preimage.observations import Observation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGICS = {b"nsgg": "session", b"qsgg": "sequence state"}  # ggsn and ggsq as little-endian numbers
_NEWEST = {"session": 10, "sequence state": 3}
_MOST_CELLS = 1 << 22  # tokens of a cache, far beyond any context
_MOST_LAYERS = 1 << 12
_MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
_ORDERS = ("pairs", "halves")
_STORED = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "fp16",
    GGMLQuantizationType.BF16: "bf16",
}


class _UnfitError(ValueError):
    """This layout does not account for the bytes of the file."""


class _Layout(NamedTuple):
    """What differs between versions: logits before the cache, a count of streams, bytes added to a cell."""

    outputs: bool
    streams: bool
    extra: int


_LAYOUTS = {
    "new": tuple(_Layout(False, True, extra) for extra in (0, 12)),
    "old": tuple(
        _Layout(outputs, streams, extra)
        for outputs in (True, False)
        for streams in (True, False)
        for extra in (0, 8)
    ),
}


@dataclass(frozen=True)
class _Stream:
    """Cells of a cache, the keys and the values of its layers."""

    sequences: dict[int, NDArray[np.int64]]  # of every sequence: its cells in the order of positions
    positions: NDArray[np.int64]  # of every cell
    keys: tuple[Kept, ...]
    values: tuple[Kept, ...]


@dataclass(frozen=True)
class _Header:
    kind: str
    version: int
    token_ids: tuple[int, ...]
    end: int

    @property
    def newest(self) -> bool:
        return self.version == _NEWEST[self.kind]


class _Cursor:
    """Numbers out of a file, one after another, and never beyond its end."""

    def __init__(self, raw: NDArray[np.uint8], at: int) -> None:
        self.raw, self.at = raw, at

    def skip(self, count: int) -> int:
        """Step over bytes; where they begin."""
        start = self.at
        if count < 0 or count > len(self.raw) - start:
            raise _UnfitError
        self.at += count
        return start

    def number(self, dtype: str, most: int, least: int = 0) -> int:
        """One number from ``least`` to ``most``."""
        size = np.dtype(dtype).itemsize
        start = self.skip(size)
        value = int(self.raw[start : start + size].view(dtype)[0])
        if not least <= value <= most:
            raise _UnfitError
        return value

    @property
    def ended(self) -> bool:
        return self.at == len(self.raw)


def read(path: Path, told: Told) -> Holding | None:
    """What a session file or a saved sequence holds; None where the file is neither."""
    size = path.stat().st_size if path.is_file() else 0
    if size < 12:
        return None
    raw = np.memmap(path, np.uint8, mode="r")
    kind = _MAGICS.get(raw[:4].tobytes())
    if kind is None:
        return None
    if told.order is not None and told.order not in _ORDERS:
        raise StatesError(
            f"Order {shown(told.order)!r} is none of llama.cpp's.", f"Use {' or '.join(_ORDERS)}."
        )
    header = _header(path, raw, kind, told)
    architecture, streams, notes = _state(raw, header)
    kept = _pieces(path, header, architecture, streams, told, notes)
    named = f" of a {architecture} model" if architecture else ""
    return Holding(
        (path,),
        f"llama.cpp {kind}",
        f"A {kind} file of llama.cpp, version {header.version}, known by its first bytes: the ids of "
        f"{len(header.token_ids)} tokens in the clear, then the cache{named}.",
        kept,
        tuple(dict.fromkeys(notes)),
    )


def _header(path: Path, raw: NDArray[np.uint8], kind: str, told: Told) -> _Header:
    version, count = (int(value) for value in raw[4:12].view("<u4"))
    if count > (len(raw) - 12) // 4:
        raise StatesError(
            f"{path.name} claims {count} token ids, and has room for {(len(raw) - 12) // 4}.",
            "It is cut short or damaged; copy it again.",
        )
    ids = raw[12 : 12 + 4 * count].view("<i4")
    highest = (1 << 24) if told.sizes is None else told.sizes.vocab_size
    if count and (int(ids.min()) < -1 or int(ids.max()) >= highest):
        raise StatesError(
            f"{path.name} holds token ids from {int(ids.min())} to {int(ids.max())}; the vocabulary ends at "
            f"{highest - 1}.",
            "It is damaged, or of another model; name the model that made it.",
        )
    return _Header(kind, version, tuple(map(int, ids)), 12 + 4 * count)


def _state(raw: NDArray[np.uint8], header: _Header) -> tuple[str | None, list[_Stream], list[str]]:
    """The architecture, the streams of the cache, and notes; no streams where they cannot be told."""
    notes: list[str] = []
    age = "new" if header.newest else "old"
    if not header.newest and header.version != _NEWEST[header.kind] - 1:
        notes.append(f"Version {header.version} of these files is not known: the cache was not read.")
        return None, [], notes
    for layout in _LAYOUTS[age]:
        if header.kind != "session" and layout.outputs:
            continue
        cursor = _Cursor(raw, header.end)
        try:
            architecture = _architecture(cursor) if header.kind == "session" else None
            if layout.outputs:
                _skip_outputs(cursor)
            caches = list(_caches(cursor, layout))
        except _UnfitError:
            continue
        if len(caches) > 1:
            notes.append(
                f"It holds {len(caches)} caches, one of blocks that see a window alone, and does not say "
                "which blocks: keys and values were not read."
            )
            return architecture, [], notes
        return architecture, caches[0], notes
    notes.append(
        "The cache after the token ids is damaged, cut short, or of a model with a recurrent state: keys and "
        "values were not read."
    )
    return None, [], notes


def _architecture(cursor: _Cursor) -> str:
    length = cursor.number("<u4", 64)
    start = cursor.skip(length)
    name = cursor.raw[start : start + length].tobytes()
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise _UnfitError
    return name.decode("ascii")


def _skip_outputs(cursor: _Cursor) -> None:
    """What versions up to 9 kept of the last batch: which tokens had outputs, their logits and embeddings."""
    most = len(cursor.raw)
    cursor.skip(4 * cursor.number("<u4", most))
    for _ in ("logits", "embeddings"):
        cursor.skip(4 * cursor.number("<u8", most))


def _caches(cursor: _Cursor, layout: _Layout) -> Iterator[list[_Stream]]:
    while True:
        count = cursor.number("<u4", _MOST_SEQUENCES, 1) if layout.streams else 1
        yield [stream for _ in range(count) if (stream := _stream(cursor, layout)) is not None]
        if cursor.ended:
            return


def _stream(cursor: _Cursor, layout: _Layout) -> _Stream | None:
    cells = cursor.number("<u4", _MOST_CELLS)
    if cells == 0:
        return None
    positions, sequences = _cells(cursor, cells, layout.extra)
    transposed = cursor.number("<u4", 1) == 1
    layers = cursor.number("<u4", _MOST_LAYERS, 1)
    keys = tuple(_rows(cursor, cells) for _ in range(layers))
    # latent caches have keys alone
    values = () if cursor.ended else tuple(_rows(cursor, cells, transposed) for _ in range(layers))
    ordered = {}
    for number, members in sequences.items():
        at = np.asarray(members, np.int64)
        ordered[number] = at[np.argsort(positions[at], kind="stable")]
        if len(np.unique(positions[at])) < len(at):
            raise _UnfitError
    return _Stream(ordered, positions, keys, values)


def _cells(
    cursor: _Cursor, count: int, extra: int
) -> tuple[NDArray[np.int64], dict[int, NDArray[np.int64] | list[int]]]:
    """The position of every cell, and the cells of every sequence; nearly always each is of just one."""
    here, step = cursor.at, 12 + extra
    if count * step <= len(cursor.raw) - here:
        table = cursor.raw[here : here + count * step].reshape(count, step)
        if (_column(table, 4) == 1).all():
            cursor.skip(count * step)
            positions, owners = _column(table, 0), _column(table, 8 + extra)
            if positions.min() < 0 or owners.min() < 0 or owners.max() >= _MOST_SEQUENCES:
                raise _UnfitError
            return positions, {int(one): np.flatnonzero(owners == one) for one in np.unique(owners)}
    positions, members = np.zeros(count, np.int64), dict[int, "NDArray[np.int64] | list[int]"]()
    for cell in range(count):
        positions[cell] = cursor.number("<i4", (1 << 31) - 1)
        owners_here = cursor.number("<u4", _MOST_SEQUENCES)
        cursor.skip(extra)
        of = [cursor.number("<i4", _MOST_SEQUENCES - 1) for _ in range(owners_here)]
        for one in of or [0]:  # a saved sequence need not say which it was
            found = members.setdefault(one, [])
            assert isinstance(found, list)
            found.append(cell)
    return positions, members


def _column(table: NDArray[np.uint8], at: int) -> NDArray[np.int64]:
    return np.ascontiguousarray(table[:, at : at + 4]).view("<i4")[:, 0].astype(np.int64)


def _rows(cursor: _Cursor, cells: int, transposed: bool = False) -> Kept:
    """Where the numbers of one layer are: a row a cell, or, of transposed values, a row a coordinate."""
    number = cursor.number("<i4", 1 << 10)
    try:
        kind = GGMLQuantizationType(number)
        group, size = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise _UnfitError from None
    if transposed:
        if cursor.number("<u4", size, size) and group != 1:
            raise _UnfitError
        width = cursor.number("<u4", 1 << 24, 1)
    else:
        row = cursor.number("<u8", 1 << 28, 1)
        if row % size:
            raise _UnfitError
        width = row // size * group
    start = cursor.skip(cells * width // group * size)
    return Kept(kind, start, cells, width, transposed)


def _pieces(
    path: Path,
    header: _Header,
    architecture: str | None,
    streams: list[_Stream],
    told: Told,
    notes: list[str],
) -> tuple[Piece, ...]:
    ids = tuple(one for one in header.token_ids if one >= 0)
    if len(ids) < len(header.token_ids):
        notes.append(f"{len(header.token_ids) - len(ids)} tokens have no id: images or sound.")
    clear = (Clear("the header of the file", token_ids=ids),) if ids else ()
    found = [(number, stream) for stream in streams for number in stream.sequences]
    whole = Piece(path.name, len(header.token_ids), clear=clear)
    if not found:
        return (whole,)
    _check_sizes(path, streams[0], told)
    order = _order(path, header, architecture, streams[0], told, notes)
    pieces = []
    for number, stream in found:
        cells = stream.sequences[number]
        at = tuple(map(int, stream.positions[cells]))
        start, gaps = at[0], at != tuple(range(at[0], at[0] + len(at)))
        seen = _seen(path, header, stream, number, order, at if gaps else None, told, notes)
        name = path.name if len(found) == 1 else f"{path.name}, sequence {number}"
        mine = clear if len(found) == 1 else ()
        pieces.append(Piece(name, len(at), 0 if gaps else start, seen, mine))
    if len(found) > 1:
        notes.append(f"It holds {len(found)} sequences, and does not say whose the token ids are.")
        pieces.insert(0, whole)
    return tuple(pieces)


def _order(
    path: Path, header: _Header, architecture: str | None, stream: _Stream, told: Told, notes: list[str]
) -> Order:
    """How coordinates of keys lie in a head: as told, as the architecture is known to, or as they look."""
    size = told.sizes.head_size if told.sizes else None
    if told.order is not None or architecture in IN_PAIRS | AS_THEY_ARE:
        pairs = architecture in IN_PAIRS if told.order is None else told.order == "pairs"
        return Order(pairs, size)
    if size is None:
        return Order(True, None)  # which leaves keys out, as it must
    pairs = keys_in_pairs(path, stream.keys, size, _turned(header, stream.keys))
    notes.append(
        f"The file does not say how keys lie in a head; they look like {'pairs' if pairs else 'halves'}. "
        "Say order pairs or halves if they are not recovered."
    )
    return Order(pairs, size)


def _seen(
    path: Path, header: _Header, stream: _Stream, number: int, order: Order, at: tuple[int, ...] | None,
    told: Told, notes: list[str],
) -> tuple[Seen, ...]:  # fmt: skip
    cells = stream.sequences[number]
    if not stream.values:
        notes.append("It is a latent cache, without values of its own, which is not read.")
        return ()
    seen = []
    for place, kept in (("keys", stream.keys), ("values", stream.values)):
        quantised = kept[0].kind not in _STORED
        turned = _turned(header, kept)
        if order.head is None and (turned or (place == "keys" and order.pairs)):
            notes.append(f"To read {place} the size of a head must be known: name the model.")
            continue
        turn = turn_of(place, order.head) if turned and order.head is not None else 1
        if quantised:
            undone = f", turned before by a Hadamard matrix of {turn}, which is undone" if turn > 1 else ""
            notes.append(f"{place.capitalize()} are kept as {kept[0].kind.name}{undone}.")
        lie = Order(order.pairs and place == "keys", order.head)
        for layer, one in enumerate(kept, start=1):
            what = Observation(place, stored=_STORED.get(one.kind), at=at)
            seen.append(Seen(layer, what, partial(read_numbers, path, one, cells, lie, turn)))
    return tuple(sorted(seen, key=lambda one: (one.layer, one.observation.place)))


def _turned(header: _Header, kept: tuple[Kept, ...]) -> bool:
    """Whether these were turned before they were quantised: since 2026, which older versions do not tell."""
    return header.newest and kept[0].kind not in _STORED


def _check_sizes(path: Path, stream: _Stream, told: Told) -> None:
    sizes, held = told.sizes, {one.width for one in (*stream.keys, *(stream.values or ()))}
    if sizes is None or not stream.values:
        return
    if len(stream.keys) != sizes.n_layers or held != {sizes.width}:
        widths = ", ".join(map(str, sorted(held)))
        raise StatesError(
            f"{path.name} holds {len(stream.keys)} blocks of {widths} numbers a token; the model has "
            f"{sizes.n_layers} of {sizes.width}.",
            "Name the model that made it.",
        )
