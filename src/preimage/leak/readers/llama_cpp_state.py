"""Where the cells of a llama.cpp cache and the numbers of every layer lie in a file; no number is read here.

After the source of llama.cpp (``state_write`` of its caches). No length is written of anything: a layout is
believed where it accounts for every byte up to the end of the file.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from preimage.leak.readers.llama_cpp_numbers import Kept

if TYPE_CHECKING:
    from numpy.typing import NDArray

# No cache is larger, and what a damaged file claims costs no more than this.
MOST_CELLS = 1 << 21  # tokens
_MOST_LAYERS = 1 << 10
_MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
_MOST_OWNERS = 1 << 24  # sequences of all cells together
_MOST_CACHES = 2  # of all blocks, or of those that see everything and those that see a window
_MOST_BYTES = 1 << 28  # a row
_NAMES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")  # what a cache may be of
_KINDS = {kind.value: kind for kind in map(GGMLQuantizationType.__getitem__, _NAMES)}


class _UnfitError(ValueError):
    """This layout does not account for the bytes of the file."""


class _Layout(NamedTuple):
    """What differs between versions: logits before the cache, a count of streams, bytes added to a cell."""

    outputs: bool
    streams: bool
    extra: int


# Bytes are added to a cell where a position has several parts (images), or the model looks at token n-grams.
_NEW = tuple(_Layout(False, True, extra) for extra in (0, 12))
_OLD = tuple(
    _Layout(outputs, streams, extra)
    for outputs in (True, False)
    for streams in (True, False)
    for extra in (0, 8)
)


@dataclass(frozen=True)
class Stream:
    """Cells that lie together: whose they are, and the keys and values of every layer for them."""

    positions: NDArray[np.int64]  # of every cell
    sequences: Mapping[int, NDArray[np.int64]]  # of every sequence: its cells in the order of positions
    keys: tuple[Kept, ...]
    values: tuple[Kept, ...]  # empty: a latent cache


class State(NamedTuple):
    """The architecture, where it is told, and the streams of every cache; empty ones are left out."""

    architecture: str | None
    caches: tuple[tuple[Stream, ...], ...]


def find_state(raw: NDArray[np.uint8], start: int, whole: bool, new: bool) -> State | None:
    """What lies from ``start`` to the end, a ``whole`` session or one sequence; None where nothing fits."""
    for layout in _NEW if new else _OLD:
        if layout.outputs and not whole:
            continue
        cursor = _Cursor(raw, start)
        try:
            architecture = _architecture(cursor) if whole else None
            if layout.outputs:
                _skip_outputs(cursor)
            return State(architecture, tuple(_caches(cursor, layout)))
        except _UnfitError:
            continue
    return None


class _Cursor:
    """Numbers out of a file, one after another, and never beyond its end."""

    def __init__(self, raw: NDArray[np.uint8], at: int) -> None:
        self.raw, self.at = raw.data, at

    def skip(self, count: int) -> int:
        """Step over bytes; where they begin."""
        start = self.at
        if count > len(self.raw) - start:
            raise _UnfitError
        self.at += count
        return start

    def numbers(self, kinds: str) -> tuple[int, ...]:
        """Numbers of the kinds that ``struct`` has letters for."""
        kinds = "<" + kinds
        return struct.unpack_from(kinds, self.raw, self.skip(struct.calcsize(kinds)))

    def number(self, kind: str, most: int, least: int = 0) -> int:
        """One number from ``least`` to ``most``."""
        (value,) = self.numbers(kind)
        if not least <= value <= most:
            raise _UnfitError
        return value

    @property
    def ended(self) -> bool:
        return self.at == len(self.raw)


def _architecture(cursor: _Cursor) -> str:
    length = cursor.number("I", 64)
    start = cursor.skip(length)
    name = cursor.raw[start : start + length].tobytes()
    if not name.isascii() or not name.decode("ascii").isprintable():
        raise _UnfitError
    return name.decode("ascii")


def _skip_outputs(cursor: _Cursor) -> None:
    """What version 9 kept of the last batch: which tokens had outputs, their logits and embeddings."""
    for kind in ("I", "Q", "Q"):
        cursor.skip(4 * cursor.number(kind, len(cursor.raw)))


def _caches(cursor: _Cursor, layout: _Layout) -> Iterator[tuple[Stream, ...]]:
    for _ in range(_MOST_CACHES):
        count = cursor.number("I", _MOST_SEQUENCES, 1) if layout.streams else 1
        found = [_stream(cursor, layout) for _ in range(count)]
        yield tuple(stream for stream in found if stream is not None)
        if cursor.ended:
            return
    raise _UnfitError


def _stream(cursor: _Cursor, layout: _Layout) -> Stream | None:
    count = cursor.number("I", MOST_CELLS)
    if count == 0:
        return None
    positions, sequences = _cells(cursor, count, layout.extra)
    transposed = cursor.number("I", 1) == 1
    layers = cursor.number("I", _MOST_LAYERS, 1)
    keys = tuple(_kept(cursor, count) for _ in range(layers))
    values: tuple[Kept, ...] = ()
    if not cursor.ended:
        values = tuple(_kept(cursor, count, transposed) for _ in range(layers))
    return Stream(positions, sequences, keys, values)


def _cells(cursor: _Cursor, count: int, extra: int) -> tuple[NDArray[np.int64], dict[int, NDArray[np.int64]]]:
    """The position of every cell, and the cells of every sequence."""
    if count * (8 + extra) > len(cursor.raw) - cursor.at:  # before memory is taken for so many
        raise _UnfitError
    positions, members, left = array("q"), dict[int, "array[int]"](), _MOST_OWNERS
    for cell in range(count):
        position, owners = cursor.numbers("iI")
        left -= owners
        if position < 0 or owners > _MOST_SEQUENCES or left < 0:
            raise _UnfitError
        positions.append(position)
        cursor.skip(extra)
        for owner in cursor.numbers(f"{owners}i") or (0,):  # older files of one sequence do not say which
            members.setdefault(owner, array("I")).append(cell)
    if not all(0 <= owner < _MOST_SEQUENCES for owner in members):
        raise _UnfitError
    where = np.asarray(positions, np.int64)
    return where, {owner: _in_order(where, cells) for owner, cells in members.items()}


def _in_order(positions: NDArray[np.int64], cells: array[int]) -> NDArray[np.int64]:
    """Cells by their positions, of which none may be there twice: pictures have such, and are not read."""
    found = np.asarray(cells, np.int64)
    found = found[np.argsort(positions[found])]
    if (np.diff(positions[found]) == 0).any():
        raise _UnfitError
    return found


def _kept(cursor: _Cursor, cells: int, transposed: bool = False) -> Kept:
    """Where the numbers of one layer are: a row a cell, or, of transposed values, a row a coordinate."""
    kind = _KINDS.get(cursor.number("i", 1 << 10))
    if kind is None:
        raise _UnfitError
    group, size = GGML_QUANT_SIZES[kind]
    if transposed:
        cursor.number("I", size, size)
        width, rest = cursor.number("I", _MOST_BYTES, 1), group - 1
    else:
        groups, rest = divmod(cursor.number("Q", _MOST_BYTES, 1), size)
        width = groups * group
    if rest or not width:
        raise _UnfitError
    kept = Kept(kind, 0, cells, width, transposed)
    return kept._replace(start=cursor.skip(kept.shape[0] * kept.shape[1]))
