"""Blocks of keys and values that vLLM's file tier keeps, raw, each named by its block hash.

After the source of vLLM 0.33.0: ``<base>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``, beside
``<base>/config.json``, which says the type, the tokens a block and the layers. The order of the axes stands
there only where a canonical layout was asked for. A file is filled up with zeros to whole memory pages.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from preimage.errors import StatesError, shown
from preimage.leak.holdings import BlockName, Holding, Piece, Seen, Sizes, Told
from preimage.leak.readers.raw import RawPages, scale_note, stored_name
from preimage.observations import Observation

KIND = "vLLM block"
_NAME = re.compile(r"([0-9a-f]{64}|[0-9a-f]{32})\.bin")
_GROUP = re.compile(r"([0-9a-f]{2})_g([0-9]{1,4})")
_RANK = re.compile(r"(.+)_r([0-9]{1,6})", re.DOTALL)
_LAYER = re.compile(r"\.([0-9]{1,5})\.")
_LARGEST_CONFIG = 1 << 20
_MOST = 1 << 20  # tokens a block, or blocks a file: more is nonsense
_SHAPE = "A block does not say its shape: name the model, so that keys and values can be read."
_DTYPES = {
    "float32": "float32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8_e5m2",
}
# vLLM's names of its layouts; keys and values of a head lie side by side (C), in older ones apart (2).
_ORDERS = {
    "LBNHC": "LBNH2C",
    "LBHNC": "LBHN2C",
    "LHBNC": "LHBN2C",
    "BLNHC": "BLNH2C",
    "BLHNC": "BLHN2C",
    "BHLNC": "BHLN2C",
    "LB2NHC": "LB2NHC",
    "LB2HNC": "LB2HNC",
}
_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


@dataclass(frozen=True)
class _Config:
    """What a tier's config.json says of its files, as far as they are read."""

    model: str
    dtype: str
    page: int  # tokens a block hash
    tokens_a_block: int
    blocks: int  # a file
    layers: tuple[str, ...]
    canonical: str | None
    unread: str | None  # why these files cannot be read


def read(path: Path, told: Told) -> Holding | None:
    """What a block holds; None where the file is none."""
    match = _NAME.fullmatch(path.name)
    if match is None or not _in_its_place(path, match[1]):
        return None
    config = _config(path)
    model = "a model" if config is None else f"the model {shown(config.model)}"
    about = (
        f"Keys and values of {model}, written by vLLM's file tier as raw numbers; known by its name, a "
        "digest of the token ids up to its end."
    )
    notes = ["The name is computed from the token ids: whoever guesses them can check them with it."]
    page = told.page if config is None else config.page
    scheme = "vllm-sha256" if len(match[1]) == 64 else "vllm-xxhash"
    block = BlockName(scheme, bytes.fromhex(match[1]), page)
    unread = _unread(config, told)
    if unread is not None or told.sizes is None:
        tokens = None if config is None else config.tokens_a_block * config.blocks
        piece = Piece(path.name, tokens, None, block=block)
        return Holding((path,), KIND, about, (piece,), (*notes, unread or _SHAPE))
    pages = _pages(path, config, told, told.sizes)
    notes += scale_note(pages.kind, told.scale)
    notes.append("One worker is assumed, or one layout for all: the file does not say how many wrote it.")
    seen = _seen(pages, _numbers(path, config, told.sizes), told)
    piece = Piece(path.name, pages.tokens, None, seen, block=block)
    return Holding((path,), KIND, about, (piece,), tuple(notes))


def _unread(config: _Config | None, told: Told) -> str | None:
    """Why nothing but the name can be used, in words; None: all that is needed was said somewhere."""
    if config is not None and config.unread is not None:
        return config.unread
    if told.sizes is None:
        return _SHAPE
    missing = []
    if config is None and told.page is None:
        missing.append("page, the tokens it holds (vLLM's blocks have 16 by default)")
    if config is None and told.stored is None:
        missing.append(f"stored, the type of its numbers ({', '.join(sorted({*_DTYPES.values()}))})")
    if told.order is None and (config is None or config.canonical is None):
        missing.append(f"order, that of its axes (often NHD; or HND, {', '.join(_ORDERS)})")
    return f"Its numbers were not read. Say {'; '.join(missing)}." if missing else None


def _in_its_place(path: Path, digest: str) -> bool:
    """Whether the folders above, if they look like a tier's, are those of this digest."""
    folder = path.absolute().parent
    group = _GROUP.fullmatch(folder.name)
    if group is None:
        return len(digest) == 64  # by itself, 32 digits may be anybody's
    return group[1] == digest[3:5] and folder.parent.name == digest[:3]


def _config(path: Path) -> _Config | None:
    """The tier's config.json, strictly; None where the file lies alone."""
    parents = path.absolute().parents
    group = _GROUP.fullmatch(parents[0].name)
    rank = _RANK.fullmatch(parents[2].name) if len(parents) > 3 else None
    if group is None or rank is None:
        return None
    place = parents[3] / rank[1] / "config.json"
    if not place.is_file():
        return None
    try:
        if place.stat().st_size > _LARGEST_CONFIG:
            raise ValueError("it is too large")
        return _parsed(json.loads(place.read_bytes()), int(group[2]))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise StatesError(
            f"The config.json beside {shown(path.name)} cannot be used: {type(error).__name__}.",
            "Give the file with the config.json that vLLM wrote, or without any.",
        ) from error


def _parsed(told: dict[str, object], group: int) -> _Config:
    groups = told["kv_cache_groups"]
    if not isinstance(groups, list) or not groups:
        raise ValueError("no groups")
    layers = groups[group]["layer_names"]
    if not isinstance(layers, list) or not layers or not all(isinstance(one, str) for one in layers):
        raise ValueError("no layers")
    split = [name for name in ("tp_size", "pp_size", "pcp_size", "dcp_size") if _count(told[name]) > 1]
    unread = None
    if len(groups) > 1:
        unread = "The model has several kinds of layers, whose pages overlay each other; it was not read."
    elif split or told.get("replicated_layout"):
        unread = f"Several workers share its pages ({', '.join(split) or 'replicated'}); it was not read."
    canonical = told.get("canonical_format")
    return _Config(
        _text(told["model_name"]),
        _text(told["dtype"]),
        _count(told["tokens_per_hash"]),
        _count(groups[group]["tokens_per_block"]),
        _count(told["blocks_per_file"]),
        tuple(layers),
        None if canonical is None else _text(canonical),
        unread,
    )


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise ValueError("not a count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _pages(path: Path, config: _Config | None, told: Told, sizes: Sizes) -> RawPages:
    if config is not None and len(config.layers) != sizes.n_layers:
        raise StatesError(
            f"{shown(path.name)} holds {len(config.layers)} layers, the model has {sizes.n_layers}.",
            "Use the model that made it.",
        )
    tokens = told.page if config is None else config.tokens_a_block
    if tokens is None or not 0 < tokens <= _MOST:
        raise StatesError(f"A page of {tokens} tokens is not known.", "Give 16, or what the server had.")
    counts = {
        "L": sizes.n_layers,
        "B": 1 if config is None else config.blocks,
        "N": tokens,
        "2": 2,
        "H": sizes.heads,
        "C": sizes.head_size,
    }
    order = _order(path, config, told)
    scale = 1.0 if told.scale is None else told.scale
    pages = RawPages(path, {axis: counts[axis] for axis in order}, _kind(path, config, told), scale)
    pages.check(padded=True)
    return pages


def _kind(path: Path, config: _Config | None, told: Told) -> str:
    said = told.stored if config is None else config.dtype
    kind = _DTYPES.get(said or "", said or "")
    if kind not in _DTYPES.values():
        raise StatesError(
            f"{shown(path.name)} holds {shown(str(said))}, which is not read.",
            f"Those of {', '.join(sorted({*_DTYPES.values()}))} are.",
        )
    if told.stored not in (None, stored_name(kind)):
        raise StatesError(
            f"{shown(path.name)} holds {shown(str(said))} by its config.json, not {shown(str(told.stored))}.",
            "Leave out the stored type.",
        )
    return kind


def _order(path: Path, config: _Config | None, told: Told) -> str:
    """The axes of the file, as told or as a canonical format names them: v1-nhd."""
    said = told.order
    if said is None and config is not None and config.canonical is not None:
        said = config.canonical.partition("-")[2]
    name = _ALIASES.get((said or "").upper(), (said or "").upper())
    if name not in _ORDERS:
        raise StatesError(
            f"{shown(path.name)} has no order {shown(str(said))}.",
            f"Use NHD, HND, or one of {', '.join(_ORDERS)}.",
        )
    return _ORDERS[name]


def _numbers(path: Path, config: _Config | None, sizes: Sizes) -> tuple[int, ...]:
    """The block of the model that each layer of the file is, counted from 1, by the layers' names."""
    if config is None:
        return tuple(range(1, sizes.n_layers + 1))
    found = [_LAYER.search(name) for name in config.layers]
    numbers = tuple(int(match[1]) + 1 for match in found if match is not None)
    if sorted(numbers) != list(range(1, sizes.n_layers + 1)):
        raise StatesError(
            f"The layers of {shown(path.name)} are not those of the model, each once.",
            "Use the model that made it.",
        )
    return numbers


def _seen(pages: RawPages, layers: tuple[int, ...], told: Told) -> tuple[Seen, ...]:
    stored = stored_name(pages.kind)
    places = (
        Observation("keys", rotary=told.rotary or "after", stored=stored),
        Observation("values", stored=stored),
    )
    return tuple(
        Seen(layer, place, partial(pages.part, index, half))
        for index, layer in enumerate(layers)
        for half, place in enumerate(places)
    )
