"""Items about collisions: how near the states of different prompts come to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from preimage.collisions import (
    CollisionAudit,
    CollisionOptions,
    LayerCollisions,
    closest_prompts,
    find_collisions,
    scan_continuations,
    sweep_lengths,
)
from preimage.collisions.result import Spacing
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.models.rounded import ROUNDINGS, rounded_copy
from preimage.progress import Progress
from preimage.prompts import PromptSet
from preimage.reproduce.options import Sizes
from preimage.reproduce.result import Measured, Row
from preimage.reproduce.texts import alike_next, layers_of, some

_PLAIN = CollisionOptions(hard_bases=0)
_AT = {  # minima at layer 1, L/2 and L of Llama-3.1-8B, Mistral-7B, Phi-4-mini and TinyStories-33M
    "first": "0.001, 0.002, 0.014, 0.029",
    "middle": "0.129, 0.187, 1.336, 1.434",
    "last": "0.620, 1.274, 9.020, 2.793",
}
_FOUR = "(Llama-3.1-8B, Mistral-7B, Phi-4-mini, TinyStories-33M)"
_GPT2 = (0.40, 0.43, 0.55, 0.67, 0.70, 0.77, 0.94, 1.14, 1.41, 1.82, 2.5, 5.4)  # read off a figure
_ROUNDED = {
    "full precision": "1.274, 1.136, 8.8 (Llama-3.1-8B, Mistral-7B, Phi-4-mini)",
    "int8": "6.597, 2.692, 21.0",
    "fp4": "2.281, 1.748, 18.4",
}
_SEVERAL = 8  # prompts from which those of one next token are compared


def prompts(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """All pairs of many prompts, at every layer, and hard pairs beside them."""
    audit = find_collisions(model, some(model, sizes), layers_of(model, sizes), progress=progress)
    rows = [_row(f"layer {one.layer}", _published(model, one.layer), one) for one in audit.layers]
    return rows, {"audit": audit.to_dict()}


def continuations(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Every next token of the prompts that are closest to another, compared with every other."""
    layer = layers_of(model, sizes)[-1]
    audit = find_collisions(model, some(model, sizes), [layer], options=_PLAIN, progress=progress)
    closest = closest_prompts(audit, layer, max(1, sizes.slow))
    scan = scan_continuations(model, closest, layer, progress=progress)
    rows = []
    for index, one in enumerate(scan.prefixes):
        said = "17 to 44 (Gemma-3-1B), 2.6 to 5.2 (GPT-2)" if not index else ""
        values = _values(one.spacing)
        words = f"{_margin(one.spacing)} over {one.spacing.pairs:,} pairs"
        rows.append(Row(f"prefix {index + 1}", said, words, values, _judged(one.spacing)))
    return rows, {"audit": audit.to_dict(), "scan": scan.to_dict()}


def lengths(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Equally many prompts at lengths that double."""
    longest = sizes.length if model.max_length is None else min(sizes.length, model.max_length)
    wanted = sorted({max(2, longest // 2**part) for part in range(4)})
    sets = {length: some(model, sizes, length=length) for length in wanted}
    fewest = min(map(len, sets.values()))
    sets = {length: replace(ids, ids=ids.ids[:fewest]) for length, ids in sets.items()}
    layer = layers_of(model, sizes)[-1]
    audits = sweep_lengths(model, sets, [layer], options=_PLAIN, progress=progress)
    said = {wanted[0]: "about 5 at 80 tokens (GPT-2)", wanted[-1]: "about 35 at 500 tokens (GPT-2)"}
    rows = [
        _row(f"{length} tokens", said.get(length, ""), audit.at(layer)) for length, audit in audits.items()
    ]
    return rows, {"lengths": {str(length): audit.to_dict() for length, audit in audits.items()}}


def quantised(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """The same prompts in models whose weights are rounded."""
    ids, layer = some(model, sizes), layers_of(model, sizes)[-1]
    rows, raw = list[Row](), dict[str, Any]()
    for done, kind in enumerate(("full precision", *ROUNDINGS)):
        progress(done, len(ROUNDINGS) + 1, f"weights, now {kind}")
        this = model if kind == "full precision" else rounded_copy(model, kind)
        audit = find_collisions(this, ids, [layer], options=_PLAIN)
        rows.append(_row(kind, _ROUNDED.get(kind, ""), audit.at(layer)))
        raw[kind] = audit.to_dict()
    return rows, {"weights": raw}


def same_next(model: LanguageModel, sizes: Sizes, progress: Progress) -> Measured:
    """Different prompts after which the model expects the same token: pairs within each such group."""
    groups = [ids for ids in alike_next(model, sizes).values() if len(ids) >= _SEVERAL]
    found: list[CollisionAudit] = []
    for done, ids in enumerate(groups):
        progress(done, len(groups), "groups of one next token")
        chosen = PromptSet(tuple(ids), "same-next", sizes.seed, 0)
        found.append(find_collisions(model, chosen, layers_of(model, sizes), options=_PLAIN))
    rows = [
        _nearest_of(f"layer {layer}", [audit.at(layer) for audit in found])
        for layer in (layers_of(model, sizes) if found else ())
    ]
    if not rows:
        rows = [Row("all layers", "", f"no {_SEVERAL} prompts have one next token", {}, "not measured")]
    first = replace(rows[0], published="0.694, 1.632, 4.202 (Llama-3.1-8B, by depth); no collision")
    return [first, *rows[1:]], {"groups": [audit.to_dict() for audit in found]}


def _nearest_of(what: str, some_layers: Sequence[LayerCollisions]) -> Row:
    """The smallest margin over several sets of prompts, and the pairs of all of them."""
    least = min(some_layers, key=lambda one: one.spacing.margin or float("inf"))
    pairs = sum(one.spacing.pairs for one in some_layers)
    unexplained = sum(one.unexplained for one in some_layers)
    values = _values(least.spacing) | {"pairs": pairs, "unexplained": unexplained}
    words = f"{_margin(least.spacing)} over {pairs:,} pairs of {len(some_layers)} next tokens"
    return Row(what, "", words, values, _judgement(unexplained))


def _row(what: str, published: str, one: LayerCollisions) -> Row:
    words = f"{_margin(one.spacing)} over {one.spacing.pairs:,} pairs"
    values = _values(one.spacing) | {"unexplained": one.unexplained}
    return Row(what, published, words, values, _judgement(one.unexplained))


def _published(model: LanguageModel, layer: Layer) -> str:
    """The paper's minima that stand for a layer; of its GPT-2 small where a model has as many blocks."""
    of_gpt2 = ""
    if model.n_layers == len(_GPT2) and isinstance(layer, int) and layer:
        of_gpt2 = f"{_GPT2[layer - 1]:g} (GPT-2 small, read off)"
    places = {1: "first", (model.n_layers + 1) // 2: "middle", "final": "last"}
    place = places.get(layer)
    return "; ".join(filter(None, (of_gpt2, f"{_AT[place]} {_FOUR}" if place else "")))


def _margin(spacing: Spacing) -> str:
    return "none" if spacing.margin is None else f"{spacing.margin:.4g} (noise {spacing.noise_radius:.2g})"


def _values(spacing: Spacing) -> dict[str, float | None]:
    simple = asdict(spacing)
    names = ("states", "pairs", "distinct", "margin", "normalised_margin", "mean_norm", "noise_radius",
             "within_noise", "unexplained")  # fmt: skip
    return {name: simple[name] for name in names} | {
        f"quantile_{q}": value[0] for q, value in spacing.quantiles.items()
    }


def _judged(spacing: Spacing) -> str:
    return _judgement(spacing.unexplained)


def _judgement(unexplained: int) -> str:
    return "no collision" if not unexplained else f"{unexplained:,} pairs within noise"
