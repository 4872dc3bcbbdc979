"""What LMCache keeps on a local disk: chunks of keys and values, raw, each named by a digest of token ids.

After the source of LMCache 0.5.6. A chunk's file is ``<model>@<world>@<worker>@<hash>@<dtype>.pt``; in spite
of its ending it is no torch file: it holds [2, layers, tokens, width] numbers and nothing else. Written layer
by layer, a name ends with the layer's number, and a file holds [tokens, 2, width] ([2, tokens, width] where
chunks are blended). The same names with ``.data`` are of its file connector, and others of its server for
several processes; of these the name alone is used.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from preimage.errors import StatesError, shown
from preimage.leak.block_hashes import lmcache_digest
from preimage.leak.holdings import BlockName, Holding, Piece, Seen, Sizes, Told
from preimage.leak.readers.raw import TYPES, RawPages, is_file, scale_note, size_of, stored_name
from preimage.observations import Observation

KIND = "LMCache chunk"
_NAME = re.compile(
    r"(?P<model>[^@]+)@(?P<world>[0-9]{1,6})@(?P<worker>[0-9]{1,6})@(?P<hash>-?[0-9a-f]{1,16})"
    r"@(?P<dtype>[a-z0-9_]+)(?:@(?P<layer>[0-9]{1,6}))?(?P<tags>(?:@[^@%]+%[^@]*)*)\.(?P<end>pt|data)",
    re.DOTALL,
)
_SERVER = re.compile(
    r"(?P<model>[^@]+)@0x[0-9a-f]{8}@[0-9a-f]{1,8}@[0-9a-f]{16,128}(?P<salt>@[^@]+)?\.data", re.DOTALL
)
_DTYPES = {
    "half": "fp16",
    "bfloat16": "bf16",
    "float": "float32",
    "fp8_e4m3fn": "fp8",
    "fp8_e5m2": "fp8_e5m2",
}
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how torch.save began before it wrote zip files
_ORDERS = {"T2D": "LBN2HC", "2TD": "L2BNHC"}  # of a file of one layer


@dataclass(frozen=True)
class _Name:
    """What the name of a chunk says; ``layer`` counts from 0 and is None where all are in the file."""

    model: str
    world: int
    worker: int
    digest: bytes
    dtype: str
    layer: int | None
    tags: bool
    connector: bool


def read(path: Path, told: Told) -> Holding | None:
    """What a chunk holds; None where the file is none."""
    name = _name_of(path)
    if name is None:
        return _of_server(path)
    if not is_file(path) or _is_torch(path):
        return None
    about = (
        f"Keys and values of the model {shown(name.model)}, written by LMCache as raw numbers; known by its "
        "name, a digest of the token ids up to its end."
    )
    notes = [
        "The digest has 64 bits and is computed from the token ids alone: guesses can be checked with it."
    ]
    if name.tags:
        notes.append("The request was tagged; the tags stand in the file's name.")
    if name.connector:
        notes.append("It is of LMCache's file connector, whose numbers were not read; its name was.")
    elif told.sizes is None:
        notes.append("A chunk does not say its shape: name the model, so that keys and values can be read.")
    if name.connector or told.sizes is None:
        piece = Piece(path.name, told.page, None, block=_block(name, told.page))
        return Holding((path,), KIND, about, (piece,), tuple(notes))
    kind = _kind(path, name, told)
    pages = _pages(path, name, told, told.sizes, kind)
    notes += scale_note(kind, told.scale)
    if name.world > 1:
        notes.append(f"Worker {name.worker} of {name.world}: its share of the heads is assumed, in order.")
    if told.page is None:
        notes.append(f"That its {pages.tokens} tokens are a whole chunk is assumed.")
    seen = _seen(pages, name, told, told.sizes)
    piece = Piece(path.name, pages.tokens, None, seen, block=_block(name, told.page or pages.tokens))
    return Holding((path,), KIND, about, (piece,), tuple(notes))


def _of_server(path: Path) -> Holding | None:
    """A chunk of the server for several processes: what its name says, which is not checked here."""
    match = _SERVER.fullmatch(path.name)
    if match is None or not is_file(path):
        return None
    salted = " and a salt, which stands in it" if match["salt"] else ""
    about = (
        f"Keys and values of the model {shown(match['model'])}, written by LMCache's server; known by name."
    )
    note = f"The name is a digest of the token ids{salted}, by default blake3, which is not checked here."
    return Holding((path,), KIND, about, (Piece(path.name, None, None),), (note,))


def _name_of(path: Path) -> _Name | None:
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    layer = match["layer"]
    return _Name(
        match["model"],
        int(match["world"]),
        int(match["worker"]),
        lmcache_digest(match["hash"]),
        match["dtype"],
        None if layer is None else int(layer),
        bool(match["tags"]),
        match["end"] == "data",
    )


def _block(name: _Name, page: int | None) -> BlockName:
    """By the default hash; a name does not say which was used, and all of LMCache's are tried."""
    return BlockName("lmcache-builtin", name.digest, page)


def _is_torch(path: Path) -> bool:
    """Whether torch.save wrote it after all."""
    with path.open("rb") as file:
        return file.read(len(_LEGACY)) == _LEGACY or zipfile.is_zipfile(path)


def _kind(path: Path, name: _Name, told: Told) -> str:
    """The type of the numbers: by the name, or told where the name says bytes alone."""
    if name.dtype == "uint8":  # vLLM's fp8 caches, in bytes without a type
        if told.stored in (None, "fp8"):
            return "fp8"
    elif name.dtype in _DTYPES:
        kind = _DTYPES[name.dtype]
        if told.stored in (None, stored_name(kind)):
            return kind
        raise StatesError(
            f"{shown(path.name)} says {shown(name.dtype)}, not {shown(str(told.stored))}.",
            "Leave out the stored type: the name has it.",
        )
    raise StatesError(
        f"{shown(path.name)} holds {shown(name.dtype)}, which is not read.",
        f"Chunks of {', '.join(_DTYPES)} are, and uint8 as fp8.",
    )


def _pages(path: Path, name: _Name, told: Told, sizes: Sizes, kind: str) -> RawPages:
    """The axes of the file, tokens by its size."""
    if not 0 <= name.worker < name.world or sizes.heads % name.world:
        raise StatesError(
            f"{shown(path.name)} is of worker {name.worker} of {name.world}, among {sizes.heads} heads.",
            "Only equal shares of the heads are read: check the model.",
        )
    layers = sizes.n_layers if name.layer is None else 1
    if name.layer is not None and name.layer >= sizes.n_layers:
        raise StatesError(
            f"{shown(path.name)} is of layer {name.layer}, counted from 0; the model has {sizes.n_layers}.",
            "Use the model that made it.",
        )
    order = _order(path, name, told)
    heads = sizes.heads // name.world
    size = size_of(path)
    a_token = 2 * layers * heads * sizes.head_size * TYPES[kind].itemsize
    if size == 0 or size % a_token:
        raise StatesError(
            f"{shown(path.name)} has {size} bytes, no multiple of the {a_token} of a token.",
            "It is cut short, of another model, or of latent attention (MLA), which is not read.",
        )
    counts = {"L": layers, "B": 1, "N": size // a_token, "2": 2, "H": heads, "C": sizes.head_size}
    if told.page is not None and counts["N"] > told.page:
        raise StatesError(
            f"{shown(path.name)} has {counts['N']} tokens, more than a chunk of {told.page}.",
            "Check the model and the tokens a page.",
        )
    scale = 1.0 if told.scale is None else told.scale
    pages = RawPages(path, {letter: counts[letter] for letter in order}, kind, scale)
    pages.check()
    return pages


def _order(path: Path, name: _Name, told: Told) -> str:
    if name.layer is None:
        if told.order not in (None, "2LTD"):
            raise StatesError(
                f"Order {shown(str(told.order))} is none of LMCache's chunks of all layers.",
                "Use 2LTD, or leave it out.",
            )
        return "2LBNHC"
    order = told.order or "T2D"
    if order not in _ORDERS:
        raise StatesError(
            f"Order {shown(order)} is none of LMCache's chunks of one layer.",
            "Use T2D (the default), or 2TD where chunks are blended.",
        )
    return _ORDERS[order]


def _seen(pages: RawPages, name: _Name, told: Told, sizes: Sizes) -> tuple[Seen, ...]:
    width = sizes.width // name.world
    kept = None if name.world == 1 else tuple(range(name.worker * width, (name.worker + 1) * width))
    stored = stored_name(pages.kind)
    places = (
        Observation("keys", rotary=told.rotary or "after", stored=stored, kept=kept),
        Observation("values", stored=stored, kept=kept),
    )
    return tuple(
        Seen((name.layer or 0) + index + 1, place, partial(pages.part, index, half))
        for index in range(pages.axes["L"])
        for half, place in enumerate(places)
    )
