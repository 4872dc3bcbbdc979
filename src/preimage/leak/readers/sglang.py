"""What SGLang writes: answers with hidden states in json, and pages of its hierarchical cache.

After the source of SGLang 0.5.23. A page's file is named by a digest of the token ids up to its end, the
model and the rank that wrote it; the page itself is raw numbers, whose type and order stand nowhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from preimage.errors import StatesError, shown
from preimage.leak.holdings import BlockName, Holding, Piece, Seen, Sizes, Told
from preimage.leak.readers import sglang_answers
from preimage.leak.readers.raw import TYPES, RawPages, is_file, scale_note, size_of, stored_name
from preimage.observations import Observation

_SCHEME = "sglang"
_NAME = re.compile(r"([0-9a-f]{64})(?:\.([a-z0-9_]+?))?_(.+)\.bin", re.DOTALL)
_RANKED = re.compile(r"(.*)_([0-9]{1,4})_([0-9]{1,4})", re.DOTALL)  # which rank of how many
_STAGED = re.compile(_RANKED.pattern + r"_([0-9]{1,4})_([0-9]{1,4})", re.DOTALL)  # of how many stages which
# The axes of a page, slowest first: 2 keys and values, L layers, N tokens, H heads, C numbers of a head.
_ORDERS = {"page_first": "2NLHC", "layer_first": "2LNHC", "page_first_direct": "2LNHC", "page_head": "2HNLC"}
_USUAL = "page_first"  # what a server takes where it is told nothing
_LOOKED_AT = 1 << 16  # numbers that tell bf16 and fp16 apart
_PLAUSIBLE = range(103, 140)  # exponents of bf16 numbers from 2^-24 to 2^12


@dataclass(frozen=True)
class _Name:
    """What the name of a page says; ``ranks`` is None of latent caches, which have no heads."""

    digest: bytes
    pool: str | None
    model: str
    rank: int = 0
    ranks: int | None = None
    stage: int = 0
    stages: int = 1


def read(path: Path, told: Told) -> Holding | None:
    """What an answer or a page holds; None where the file is neither."""
    name = _name_of(path)
    if name is None:
        return sglang_answers.read(path, told)
    if not is_file(path):
        return None
    about = (
        f"A page of SGLang's hierarchical cache, of the model {shown(name.model)}, known by its name: a "
        "digest of the token ids up to its end."
    )
    notes = [
        "The name is computed from the token ids alone, unless the request had a salt: whoever guesses them "
        "can check them without the page."
    ]
    unread = _unread(name, told)
    if unread is not None:
        piece = Piece(path.name, told.page, None, block=BlockName(_SCHEME, name.digest, told.page))
        return Holding((path,), "SGLang cache page", about, (piece,), (*notes, unread))
    assert told.sizes is not None  # else it is not read
    pages, seen = _page(path, name, told, told.sizes, notes)
    block = BlockName(_SCHEME, name.digest, pages.tokens)
    piece = Piece(path.name, pages.tokens, None, seen, block=block)
    return Holding((path,), "SGLang cache page", about, (piece,), tuple(notes))


def _name_of(path: Path) -> _Name | None:
    """What the name of a page says, read so that its numbers make sense: a model's own may end in numbers."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    digest, pool, rest = bytes.fromhex(match[1]), match[2], match[3]
    for pattern in (_STAGED, _RANKED):
        told = pattern.fullmatch(rest)
        if told is not None:
            rank, ranks, stages, stage = (*map(int, told.groups()[1:]), 1, 0)[:4]
            if rank < ranks and stage < stages:
                return _Name(digest, pool, told[1], rank, ranks, stage, stages)
    return _Name(digest, pool, rest)


def _unread(name: _Name, told: Told) -> str | None:
    """Why nothing but the name can be used, in words."""
    if name.pool is not None:
        return f"It is of the pool {shown(name.pool)}, not of keys and values, and was not read."
    if name.ranks is None:
        return "It is a latent or a sharded cache, which is not read."
    if told.sizes is None:
        return "A page says nothing of its shape: name the model, so that keys and values can be read."
    if told.stored is None and not told.page:
        return (
            f"A page does not say the type of its numbers. Say it with stored ({', '.join(TYPES)}), or how "
            "many tokens a page has, so that it can be read."
        )
    return None


def _page(
    path: Path, name: _Name, told: Told, sizes: Sizes, notes: list[str]
) -> tuple[RawPages, tuple[Seen, ...]]:
    order = told.order or _USUAL
    if order not in _ORDERS:
        raise StatesError(f"Order {shown(order)!r} is none of SGLang's.", f"Use {', '.join(_ORDERS)}.")
    layers, heads = _layers(sizes.n_layers, name), _heads(sizes.heads, name)
    a_token, size = 2 * len(layers) * len(heads) * sizes.head_size, size_of(path)
    if a_token == 0:
        raise StatesError(
            f"{shown(path.name)} names {name.ranks} ranks and {name.stages} stages; the model has "
            f"{sizes.heads} heads of keys and {sizes.n_layers} layers.",
            "Name the model that made it.",
        )
    if size == 0 or size % a_token:
        raise StatesError(
            f"{shown(path.name)} has {size} bytes, which is no page of {len(layers)} layers of {len(heads)} "
            f"heads: those are a multiple of {a_token}.",
            "It is cut short, or of another model; name the model that made it.",
        )
    stored, tokens = _type(path, size // a_token, told, notes)
    extents = {"2": 2, "B": 1, "L": len(layers), "N": tokens, "H": len(heads), "C": sizes.head_size}
    axes = {letter: extents[letter] for letter in "B" + _ORDERS[order]}
    pages = RawPages(path, axes, stored, 1.0 if told.scale is None else told.scale)
    pages.check()
    if told.order is None and tokens > 1:
        notes.append(f"The order of a page stands nowhere: {_USUAL}, the server's default, is assumed.")
    notes.extend(scale_note(stored, told.scale))
    kept = None if len(heads) == sizes.heads else _coordinates(heads, sizes.head_size)
    places = (
        Observation("keys", rotary=told.rotary or "after", stored=stored_name(stored), kept=kept),
        Observation("values", stored=stored_name(stored), kept=kept),
    )
    seen = tuple(
        Seen(layer + 1, place, partial(pages.part, index, half))
        for index, layer in enumerate(layers)
        for half, place in enumerate(places)
    )
    return pages, seen


def _coordinates(heads: range, head_size: int) -> tuple[int, ...]:
    """Those of a rank's heads among all keys, and so among all values."""
    return tuple(range(heads.start * head_size, heads.stop * head_size))


def _layers(n_layers: int, name: _Name) -> range:
    """Those of a pipeline stage, counted from 0; the last stages have one more where they do not divide."""
    each, more = divmod(n_layers, name.stages)
    longer = name.stages - more
    first = name.stage * each + max(0, name.stage - longer)
    return range(first, first + each + (name.stage >= longer))


def _heads(heads: int, name: _Name) -> range:
    """Those of a tensor-parallel rank, of which several may have the same; none where they do not divide."""
    ranks = name.ranks or 1
    each, copies = max(1, heads // ranks), max(1, ranks // heads)
    first = name.rank // copies * each
    return range(first, first + each) if each * ranks == heads * copies else range(0)


def _type(path: Path, a_token: int, told: Told, notes: list[str]) -> tuple[str, int]:
    """The type of the numbers and the tokens of a page whose every token has ``a_token`` bytes a number."""
    stored = told.stored
    if stored is not None and stored not in TYPES:
        raise StatesError(f"Pages are not stored as {shown(stored)}.", f"Use {', '.join(TYPES)}.")
    if stored is None:
        itemsize = a_token / (told.page or 1)
        if itemsize not in (1, 2, 4):
            raise StatesError(
                f"{shown(path.name)} does not hold {told.page} tokens: those were of {itemsize:g} bytes a "
                "number.",
                "Give the page's own size, or the type of its numbers as stored.",
            )
        stored = "fp8" if itemsize == 1 else _half(path) if itemsize == 2 else "float32"
        notes.append(f"The numbers look like {stored}.")
    tokens = a_token // TYPES[stored].itemsize
    if told.page is not None and told.page != tokens:
        raise StatesError(
            f"{shown(path.name)} has {tokens} tokens of {stored}, not {told.page}.",
            "Give the page's own size, or leave it out.",
        )
    return stored, tokens


def _half(path: Path) -> str:
    """bf16 or fp16: halves of the other kind would have exponents that no state has."""
    codes = np.fromfile(path, "<u2", _LOOKED_AT)
    codes = codes[codes & 0x7FFF != 0]
    exponents = (codes >> 7) & 0xFF
    plausible = (exponents >= _PLAUSIBLE.start) & (exponents < _PLAUSIBLE.stop)
    return "bf16" if not len(codes) or plausible.mean() > 0.999 else "fp16"
