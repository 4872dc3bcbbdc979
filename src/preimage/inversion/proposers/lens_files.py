"""Lenses on disk: int8 matrices in safetensors, tied to the weights of one model and to what they read there.

Lenses for the default model come with the package; others are in the user's cache or wherever they were put.
A lens proposes and never decides, so it also serves weights that are almost those it was trained for: the
same in half precision, quantised, or tuned a little. Whether they are, the states of a few tokens tell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from preimage.errors import ModelError
from preimage.inversion.proposers.lens import Lens, LensShape
from preimage.layers import Layer, parse_layers
from preimage.models import LanguageModel, cache_folder, without_positions
from preimage.observations import PLACES, Site, Tap
from preimage.storage import BEFORE, SCHEMA, write_tensors

_SHIPPED = resources.files("preimage") / "inversion" / "lenses"
_PROBE = 16  # tokens whose states tell models apart
_ALIKE = 0.3  # by how much of their length states of almost the same weights differ at most
_served: WeakKeyDictionary[LanguageModel, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LensInfo:
    """What a lens file says of itself."""

    path: Path
    tap: Tap  # what it reads: a layer or a site, keys before rotary wherever they can be turned back
    model: str
    weight_hash: str
    shape: LensShape
    training: dict[str, Any]
    ranks: dict[str, Any]

    @property
    def layer(self) -> Layer:
        """The layer, or the block of the site."""
        return self.tap.block if isinstance(self.tap, Site) else self.tap

    @property
    def place(self) -> str:
        """What it reads there, as an observation calls it."""
        return self.tap.kind if isinstance(self.tap, Site) else "residual"


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
        "weight_hash": model.identity.weight_hash,
        "shape": lens.shape.to_dict(),
        "training": training,
        "ranks": ranks,
    }
    return write_tensors(path, tensors, about)


def read_info(path: Path) -> LensInfo:
    """What a lens file says of itself, without reading its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
        if about["schema"] not in (SCHEMA, *BEFORE) or about["kind"] != "lens":
            raise ValueError(f"its schema is {about['schema']!r}")
        rest = {name: about[name] for name in ("model", "weight_hash", "training", "ranks")}
        return LensInfo(path, _tap(about), shape=LensShape(**about["shape"]), **rest)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path} is not a lens: {error}.", "Train one with `preimage lens train`."
        ) from error


def read_lens(path: Path, model: LanguageModel) -> Lens:
    """A lens, ready to use; refused where it was trained for quite other weights."""
    info = read_info(path)
    if not _serves(info, model):
        raise ModelError(
            f"The lens {path} was trained for {info.model} (weights {info.weight_hash[:12]}), not for "
            f"{model.name} (weights {model.identity.weight_hash[:12]}).",
            "Train one for this model with `preimage lens train`.",
        )
    lens = Lens(info.shape)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if name != "probe"}  # noqa: SIM118  # not a mapping
    for name, value in list(stored.items()):
        if value.dtype == torch.int8:
            stored[name] = value.float() * stored.pop(name + ".step")[:, None]
    lens.load_state_dict({name: value.float() for name, value in stored.items()})
    return lens.to(model.device).eval().requires_grad_(False)


def known_lenses() -> list[LensInfo]:
    """Every lens that comes with the package or lies in the user's cache."""
    folders = [Path(str(_SHIPPED)), cache_folder() / "lenses"]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.safetensors"))]
    return [read_info(path) for path in paths if path.parent.suffix != ".training"]  # one that goes on


def default_path(model: LanguageModel, tap: Tap) -> Path:
    """Where a lens goes that is given no other place."""
    return cache_folder() / "lenses" / model.identity.weight_hash[:16] / f"{_name(model, tap)}.safetensors"


def find_lens(model: LanguageModel, tap: Tap) -> LensInfo | None:
    """The lens for these weights and this layer, else for the nearest layer above it, if there is one.

    Weights that are almost these count too, where there is none for just these.

    States can be carried up to another layer exactly, by the model's own blocks; never down. What is seen
    inside a block cannot: a site has its own lens or none, one for keys after and before rotary positions.
    """
    mine = [info for info in known_lenses() if _serves(info, model)]
    mine.sort(key=lambda info: info.weight_hash != model.identity.weight_hash)
    if isinstance(tap, Site):
        of_it = [info for info in mine if (info.layer, info.place) == (tap.block, tap.kind)]
        return next((info for info in of_it if info.tap == without_positions(model, tap)), None)
    heights = {at: height for height, at in enumerate(parse_layers("all", model.n_layers))}
    above = [info for info in mine if info.place == "residual" and heights[info.layer] >= heights[tap]]
    return min(above, key=lambda info: heights[info.layer], default=None)


def find_lenses(model: LanguageModel, tap: Tap) -> tuple[LensInfo, ...]:
    """The lens there is; of keys beside values without one of both, those of either half."""
    whole = find_lens(model, tap)
    if whole is None and isinstance(tap, Site) and tap.kind == "kv":
        halves = (find_lens(model, tap._replace(kind="keys")), find_lens(model, Site(tap.block, "values")))
        return tuple(half for half in halves if half is not None)
    return () if whole is None else (whole,)


def probe(model: LanguageModel, tap: Tap) -> Float[Tensor, "position d"]:
    """The states of a few fixed tokens, by which almost the same weights are known."""
    counted = model.forward_tokens
    ids = (7 + 31 * torch.arange(min(_PROBE, model.max_length or _PROBE))) % model.vocab_size
    states = model.states(ids[None], (tap,))[tap][0]
    model.forward_tokens = counted
    return states.to(torch.bfloat16).cpu()


def _serves(info: LensInfo, model: LanguageModel) -> bool:
    """Whether a lens was trained for these weights, or for almost the same."""
    if info.weight_hash == model.identity.weight_hash:
        return True
    known = _served.setdefault(model, {})
    key = model.edition, info.path, info.weight_hash, info.tap
    if key not in known:
        known[key] = _is_kin(info, model)
    return known[key]


def _is_kin(info: LensInfo, model: LanguageModel) -> bool:
    if info.layer not in parse_layers("all", model.n_layers):
        return False
    if (info.shape.d_model, info.shape.vocab_size) != (model.width(info.tap), model.vocab_size):
        return False
    try:
        with safe_open(info.path, framework="pt") as file:
            theirs = file.get_tensor("probe").float()
    except SafetensorError:  # of before there were any
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


def _tap(about: dict[str, Any]) -> Tap:
    """The inverse of :func:`told`; before preimage/4 every lens was of a layer."""
    layer: Layer = about["layer"]
    place = about.get("place", "residual")
    if place == "residual":
        return layer
    if place not in PLACES or not isinstance(layer, int):
        raise ValueError(f"it is for {place!r} of layer {layer!r}")
    return Site(layer, place, about["rotary"])


def _name(model: LanguageModel, tap: Tap) -> str:
    at = without_positions(model, tap)
    if not isinstance(at, Site):
        return f"layer-{at}"
    turned = at.kind in ("keys", "kv") and at.rotary == "after"
    return f"layer-{at.block}-{at.kind}{'-after-rotary' if turned else ''}"
