"""Lenses on disk: int8 matrices in safetensors, tied to the weights of one model and to what they read there.

Lenses for the default model come with the package; others are in the user's cache or wherever they were put.
A lens proposes and never decides, so it also serves weights that are almost those it was trained for: the
same in half precision, quantised, or tuned a little. Whether they are, the states of a few tokens tell.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from preimage.errors import ModelError, OptionError, first_line, shown
from preimage.inversion.proposers.features import features_width
from preimage.inversion.proposers.lens import Lens, LensShape
from preimage.layers import Layer, parse_layers
from preimage.models import LanguageModel, cache_folder, tokenizer_hash, without_positions
from preimage.observations import PLACES, Site, Tap, in_words
from preimage.storage import BEFORE, SCHEMA, parse_json, write_tensors

_SHIPPED = resources.files("preimage") / "inversion" / "lenses"
_PROBE = 16  # tokens whose states tell models apart
_RANKS = {"rank0", "within8", "within64", "worst", "first"}  # what is said of each kind of held-out text
_MOST_LAYERS = 10_000
_MOST_WIDE = 2**24  # rows, columns or tokens
_MAY_BE_NONE = ("neighbours", "key_hidden", "prior")  # parts that a lens may be without
_LARGEST = 1e9  # of its weights: squares of sums of them are numbers still
_ALIKE = 0.3  # by how much of their length states of almost the same weights differ at most
_served: WeakKeyDictionary[LanguageModel, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LensFacts:
    """What a lens is for, and how good it is: what its file and a registry both say."""

    tap: Tap  # what it reads: a layer or a site, keys before rotary wherever they can be turned back
    model: str
    weight_hash: str
    tokenizer_hash: str | None  # None: not known
    ranks: dict[str, dict[str, float]]

    @property
    def layer(self) -> Layer:
        """The layer, or the block of the site."""
        return self.tap.block if isinstance(self.tap, Site) else self.tap

    @property
    def place(self) -> str:
        """What it reads there, as an observation calls it."""
        return self.tap.kind if isinstance(self.tap, Site) else "residual"

    def to_dict(self) -> dict[str, Any]:
        """Plain json types, as a registry has them."""
        hashes = {"weight_hash": self.weight_hash, "tokenizer_hash": self.tokenizer_hash}
        return {"model": self.model, **told(self.tap), **hashes, "held_out": self.ranks}


@dataclass(frozen=True)
class LensInfo(LensFacts):
    """What a lens file says of itself."""

    path: Path
    shape: LensShape
    training: dict[str, Any]


def save_lens(
    lens: Lens, path: Path, *, tap: Tap, model: LanguageModel, training: dict[str, Any], ranks: dict[str, Any]
) -> Path:
    """Write a lens: matrices as int8 with one scale a row, everything else as it is."""
    tensors: dict[str, Tensor] = {}
    for name, value in lens.state_dict().items():
        value = value.detach().cpu().float()
        if value.ndim == 2 and name.endswith("weight"):
            step = (value.abs().amax(dim=1) / 127).clamp_min(1e-12)
            tensors[name] = (value / step[:, None]).round().to(torch.int8)
            tensors[name + ".step"] = step
        else:
            tensors[name] = value.half() if name == "bias" else value
    tensors["probe"] = probe(model, tap)
    about = {
        "schema": SCHEMA,
        "kind": "lens",
        **told(tap),
        "model": model.name,
        "weight_hash": model.weight_hash,
        "tokenizer_hash": tokenizer_hash(model.tokenizer),
        "shape": lens.shape.to_dict(),
        "training": training,
        "ranks": ranks,
    }
    return write_tensors(path, tensors, about)


def read_info(path: Path) -> LensInfo:
    """What a lens file says of itself, without reading its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            about = parse_json(file.metadata()["about"])
        if about["schema"] not in (SCHEMA, *BEFORE) or about["kind"] != "lens":
            raise ValueError(f"its schema is {reprlib.repr(about['schema'])}")
        facts = read_facts(about, "ranks")
        training = checked(about, "training", lambda value: isinstance(value, dict))
        return LensInfo(**vars(facts), path=path, shape=_shape(about["shape"]), training=training)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _no_lens(path, error) from error


def read_lens(path: Path, model: LanguageModel) -> Lens:
    """A lens, ready to use; refused where it was trained for quite other weights."""
    info = read_info(path)
    require_serves(info, model)
    return read_weights(info).to(model.device)


def require_serves(info: LensInfo, model: LanguageModel) -> None:
    """Refuse a lens that was trained for quite other weights."""
    if not _serves(info, model):
        theirs = f"{shown(info.model)} (weights {info.weight_hash[:12]})"
        ours = f"{model.name} (weights {model.weight_hash[:12]})"
        raise ModelError(
            f"The lens {info.path} was trained for {theirs}, not for {ours}.",
            "Train one for this model with `preimage lens train`.",
        )


def read_weights(info: LensInfo) -> Lens:
    """The lens in a file, whatever the model; refused where its tensors are not of the sizes it states."""
    try:
        with torch.device("meta"):  # stated sizes cost nothing before they are those of the tensors
            lens = Lens(info.shape)
        with safe_open(info.path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys() if name != "probe"}  # noqa: SIM118  # not a mapping
        if not all(_are_moderate(value) for value in stored.values() if value.dtype != torch.int8):
            raise ValueError("it has numbers that are none, or too large to reckon with")
        for name, value in list(stored.items()):
            if value.dtype == torch.int8:
                step = stored.pop(name + ".step")
                if value.ndim != 2 or tuple(step.shape) != (len(value),):  # else few numbers make many
                    raise ValueError(f"{reprlib.repr(name)} has no step a row")
                stored[name] = value.float() * step[:, None]
        lens.load_state_dict({name: value.float() for name, value in stored.items()}, assign=True)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise _no_lens(info.path, "its tensors are not those of its shape") from error
    return lens.eval().requires_grad_(False)


def _are_moderate(values: Tensor) -> bool:
    return bool((values.float().abs() <= _LARGEST).all())  # NaN is not


def given_lens(path: Path, model: LanguageModel, tap: Tap) -> LensInfo:
    """The lens in a file, refused where it cannot read what is seen at a tap of a model."""
    info = read_info(path)
    require_serves(info, model)
    if not any(_reads(info, model, seen) for seen in (tap, *_halves(tap))):
        rule = "its own site" if isinstance(tap, Site) else "its own layer and those below"
        raise OptionError(
            f"The lens {path} is for {in_words(info.tap)}, the states are {in_words(tap)}.",
            f"A lens reads {rule}: give another one.",
        )
    return info


def known_lenses() -> list[LensInfo]:
    """Every lens that comes with the package or lies in the user's cache."""
    folders = [Path(str(_SHIPPED)), cache_folder() / "lenses"]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.safetensors"))]
    return [read_info(path) for path in paths if path.parent.suffix != ".training"]  # one that goes on


def default_path(model: LanguageModel, tap: Tap) -> Path:
    """Where a lens goes that is given no other place."""
    return cached_path(model.weight_hash, without_positions(model, tap))


def cached_path(weight_hash: str, tap: Tap) -> Path:
    """Where in the user's cache the lens for these weights lies; keys as it learned them."""
    return cache_folder() / "lenses" / weight_hash[:16] / f"{lens_name(tap)}.safetensors"


def find_lens(model: LanguageModel, tap: Tap) -> LensInfo | None:
    """The lens for these weights and this layer, else for the nearest layer above it, if there is one.

    Weights that are almost these count too, where there is none for just these.

    States can be carried up to another layer exactly, by the model's own blocks; never down. What is seen
    inside a block cannot: a site has its own lens or none, one for keys after and before rotary positions.
    """
    mine = [info for info in known_lenses() if _serves(info, model) and _reads(info, model, tap)]
    mine.sort(key=lambda info: info.weight_hash != model.weight_hash)
    return min(mine, key=lambda info: _height(info.layer, model), default=None)


def find_lenses(model: LanguageModel, tap: Tap) -> tuple[LensInfo, ...]:
    """The lens there is; of keys beside values without one of both, those of either half."""
    whole = find_lens(model, tap)
    found = [whole] if whole is not None else [find_lens(model, half) for half in _halves(tap)]
    return tuple(info for info in found if info is not None)


def _halves(tap: Tap) -> tuple[Site, ...]:
    """Keys and values apart, of a tap where both are seen."""
    if not isinstance(tap, Site) or tap.kind != "kv":
        return ()
    return (tap._replace(kind="keys"), Site(tap.block, "values"))


def _height(layer: Layer, model: LanguageModel) -> int:
    return parse_layers("all", model.n_layers).index(layer)


def _reads(info: LensInfo, model: LanguageModel, tap: Tap) -> bool:
    """Whether a lens that serves a model reads what is seen at a tap."""
    if not isinstance(tap, Site):
        return info.place == "residual" and _height(info.layer, model) >= _height(tap, model)
    here = (info.layer, info.place) == (tap.block, tap.kind)
    return here and info.tap == without_positions(model, tap)


def probe(model: LanguageModel, tap: Tap) -> Float[Tensor, "position d"]:
    """The states of a few fixed tokens, by which almost the same weights are known."""
    counted = model.forward_tokens
    ids = (7 + 31 * torch.arange(min(_PROBE, model.max_length or _PROBE))) % model.vocab_size
    states = model.states(ids[None], (tap,))[tap][0]
    model.forward_tokens = counted
    return states.to(torch.bfloat16).cpu()


def _serves(info: LensInfo, model: LanguageModel) -> bool:
    """Whether a lens was trained for these weights, or for almost the same."""
    if not _has_sizes_of(info, model):
        return False
    if info.weight_hash == model.weight_hash:
        return True
    known = _served.setdefault(model, {})
    key = model.edition, info.path, info.weight_hash, info.tap
    if key not in known:
        known[key] = _is_kin(info, model)
    return known[key]


def _has_sizes_of(info: LensInfo, model: LanguageModel) -> bool:
    if info.layer not in parse_layers("all", model.n_layers):
        return False
    if info.shape.vocab_size != model.vocab_size:
        return False
    if info.shape.d_features != features_width(model, info.shape.key_hidden):
        return False
    return info.shape.d_model == model.width(info.tap)


def _is_kin(info: LensInfo, model: LanguageModel) -> bool:
    try:
        with safe_open(info.path, framework="pt") as file:
            theirs = file.get_tensor("probe").float()
    except (SafetensorError, RuntimeError):  # of before there were any, or no numbers that torch has
        return False
    ours = probe(model, info.tap).float()
    if theirs.shape != ours.shape:
        return False
    away = (ours - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e-30)
    return bool(away.median() <= _ALIKE)


def told(tap: Tap) -> dict[str, Any]:
    """A tap in plain json types."""
    if not isinstance(tap, Site):
        return {"layer": tap, "place": "residual"}
    return {"layer": tap.block, "place": tap.kind, "rotary": tap.rotary}


def checked(about: Any, name: str, right: Callable[[Any], bool]) -> Any:
    """A field of what json says, or a ValueError that shows what it is instead."""
    value = about.get(name) if isinstance(about, dict) else None
    if not right(value):
        raise ValueError(f"its {name} is {reprlib.repr(value)}")
    return value


def read_facts(about: Any, ranks: str = "held_out") -> LensFacts:
    """The inverse of :meth:`LensFacts.to_dict`, checked field by field; ``ranks``: their name there."""
    return LensFacts(
        tap=_tap(about),
        model=checked(about, "model", lambda value: isinstance(value, str)),
        weight_hash=checked(about, "weight_hash", is_digest),
        tokenizer_hash=checked(about, "tokenizer_hash", lambda value: value is None or is_digest(value)),
        ranks=checked(about, ranks, _are_ranks),
    )


def is_digest(value: Any) -> bool:
    """Whether it is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_whole(value: Any) -> bool:
    """Whether it is a number 0, 1, 2 …"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_ranks(value: Any) -> bool:
    rows = value.values() if isinstance(value, dict) else [None]
    return all(
        isinstance(row, dict)
        and row.keys() >= _RANKS
        and all(isinstance(share, float | int) and abs(share) <= sys.float_info.max for share in row.values())
        for row in rows
    )


def _shape(about: Any) -> LensShape:
    """Sizes of a lens as its file states them."""

    def is_size(least: int, value: Any) -> bool:
        return is_whole(value) and least <= value <= _MOST_WIDE

    return LensShape(
        **{name: checked(about, name, partial(is_size, name not in _MAY_BE_NONE)) for name in about}
    )


def _tap(about: Any) -> Tap:
    """The inverse of :func:`told`; before preimage/4 every lens was of a layer."""
    layer: Layer = checked(
        about, "layer", lambda value: value == "final" or (is_whole(value) and value < _MOST_LAYERS)
    )
    place = about.get("place", "residual")
    if place == "residual":
        return layer
    if place not in PLACES or place == "final" or not isinstance(layer, int):
        raise ValueError(f"it is for {reprlib.repr(place)} of layer {layer!r}")
    return Site(layer, place, checked(about, "rotary", lambda value: value in ("after", "before")))


def lens_name(tap: Tap) -> str:
    """What a lens for a tap is called in a folder of lenses."""
    if not isinstance(tap, Site):
        return f"layer-{tap}"
    turned = tap.kind in ("keys", "kv") and tap.rotary == "after"
    return f"layer-{tap.block}-{tap.kind}{'-after-rotary' if turned else ''}"


def _no_lens(path: Path, reason: object) -> ModelError:
    words = first_line(reason) if isinstance(reason, Exception) else reason
    return ModelError(f"{path} is not a lens: {words}.", "Train one with `preimage lens train`.")
