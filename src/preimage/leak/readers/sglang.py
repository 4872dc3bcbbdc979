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
from preimage.leak.readers.raw import TYPES, RawPages, scale_note, size_of, stored_name
from preimage.observations import Observation

SCHEME = "sglang-sha256"
_NAME = re.compile(r"([0-9a-f]{64})(?:\.([a-z0-9_]+?))?_(.+)\.bin", re.DOTALL)
_RANKS = re.compile(r"(.*?)_([0-9]{1,4})_([0-9]{1,4})(?:_([0-9]{1,4})_([0-9]{1,4}))?", re.DOTALL)
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
    if not path.is_file():
        return None
    about = (
        f"A page of SGLang's hierarchical cache, of the model {shown(name.model)}, known by its name: a "
        "digest of the token ids up to its end."
    )
    notes = ["The name is computed from the token ids alone: whoever guesses them can check them without it."]
    unread = _unread(name, told)
    if unread is not None:
        piece = Piece(path.name, told.page, None, block=BlockName(SCHEME, name.digest, told.page))
        return Holding((path,), "SGLang cache page", about, (piece,), (*notes, unread))
    assert told.sizes is not None  # else it is not read
    pages, seen = _page(path, name, told, told.sizes, notes)
    block = BlockName(SCHEME, name.digest, pages.tokens)
    piece = Piece(path.name, pages.tokens, None, seen, block=block)
    return Holding((path,), "SGLang cache page", about, (piece,), tuple(notes))


def _name_of(path: Path) -> _Name | None:
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    digest, pool, rest = bytes.fromhex(match[1]), match[2], match[3]
    ranks = _RANKS.fullmatch(rest)
    if ranks is None:
        return _Name(digest, pool, rest)
    rank, size = int(ranks[2]), int(ranks[3])
    if rank >= size:  # of a latent cache: stages, and which of them
        return _Name(digest, pool, rest)
    if ranks[4] is None:
        return _Name(digest, pool, ranks[1], rank, size)
    return _Name(digest, pool, ranks[1], rank, size, int(ranks[5]), int(ranks[4]))


def _unread(name: _Name, told: Told) -> str | None:
    """Why nothing but the name can be used, in words."""
    if name.pool is not None:
        return f"It is of the pool {shown(name.pool)}, not of keys and values, and was not read."
    if name.ranks is None:
        return "It is a latent or a sharded cache, which is not read."
    if name.stage >= name.stages:
        return "Its name says a stage that there is not; it was not read."
    if told.sizes is None:
        return "A page says nothing of its shape: name the model, so that keys and values can be read."
    return None


def _page(
    path: Path, name: _Name, told: Told, sizes: Sizes, notes: list[str]
) -> tuple[RawPages, tuple[Seen, ...]]:
    order = told.order or _USUAL
    if order not in _ORDERS:
        raise StatesError(f"Order {shown(order)!r} is none of SGLang's.", f"Use {', '.join(_ORDERS)}.")
    first, layers = _layers(sizes.n_layers, name)
    heads = _heads(sizes.heads, name)
    a_token = 2 * layers * len(heads) * sizes.head_size
    size = size_of(path)
    if size == 0 or size % a_token:
        raise StatesError(
            f"{shown(path.name)} has {size} bytes, which is no page of {layers} layers of {len(heads)} heads: "
            f"those are a multiple of {a_token}.",
            "It is cut short, or of another model; name the model that made it.",
        )
    stored, tokens = _type(path, size // a_token, told, notes)
    extents = {"2": 2, "B": 1, "L": layers, "N": tokens, "H": len(heads), "C": sizes.head_size}
    axes = {letter: extents[letter] for letter in "B" + _ORDERS[order]}
    pages = RawPages(path, axes, stored, 1.0 if told.scale is None else told.scale)
    pages.check()
    if told.order is None and tokens > 1:
        notes.append(f"The order of a page stands nowhere: {_USUAL}, the server's default, is assumed.")
    notes.extend(scale_note(stored, told.scale))
    what = Observation(
        "kv", rotary=told.rotary or "after", stored=stored_name(stored), kept=_kept(heads, sizes)
    )
    seen = tuple(Seen(first + index + 1, what, partial(pages.block, index)) for index in range(layers))
    return pages, seen


def _kept(heads: range, sizes: Sizes) -> tuple[int, ...] | None:
    """The coordinates of a rank's heads among keys beside values; None: all."""
    if len(heads) == sizes.heads:
        return None
    own = range(heads.start * sizes.head_size, heads.stop * sizes.head_size)
    return (*own, *(sizes.width + one for one in own))


def _layers(n_layers: int, name: _Name) -> tuple[int, int]:
    """The first layer of a pipeline stage and how many it has; the last stages have one more."""
    each, more = divmod(n_layers, name.stages)
    longer = max(0, name.stage - (name.stages - more))
    return name.stage * each + longer, each + (name.stage >= name.stages - more)


def _heads(heads: int, name: _Name) -> range:
    """The heads of a tensor-parallel rank; where there are more ranks than heads, several have the same."""
    ranks = name.ranks or 1
    if ranks > heads:
        return range(name.rank * heads // ranks, name.rank * heads // ranks + 1)
    each = heads // ranks
    return range(name.rank * each, (name.rank + 1) * each)


def _type(path: Path, a_token: int, told: Told, notes: list[str]) -> tuple[str, int]:
    """The type of the numbers and the tokens of a page whose every token has ``a_token`` bytes a number."""
    stored = told.stored
    if stored is not None and stored not in TYPES:
        raise StatesError(f"Pages are not stored as {shown(stored)}.", f"Use {', '.join(TYPES)}.")
    if stored is None:
        if not told.page or a_token % told.page or a_token // told.page not in (1, 2, 4):
            raise StatesError(
                f"{shown(path.name)} does not say the type of its numbers.",
                f"Say it with stored: {', '.join(TYPES)}; or how many tokens a page has.",
            )
        stored = {1: "fp8", 2: _half(path), 4: "float32"}[a_token // told.page]
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
