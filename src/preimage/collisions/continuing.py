"""``preimage.scan_continuations``: every vocabulary token after a prefix, compared with every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions.confirming import ShownStructure
from preimage.collisions.options import CollisionOptions
from preimage.collisions.result import CollisionAudit, Continuation, ContinuationScan
from preimage.collisions.spacing import Named, measure_spacing
from preimage.collisions.structure import IDENTICAL_EMBEDDINGS, UNEXPLAINED, Structure
from preimage.collisions.thresholds import require_above_noise
from preimage.distances import require_finite
from preimage.errors import OptionError, PromptError, RunFolderError
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptSet
from preimage.states import encode_all, noise_floor, safety
from preimage.storage import Run, read_json


def scan_continuations(
    model: LanguageModel,
    prefixes: Sequence[str | Sequence[int]] | PromptSet,
    layer: Layer | str = "final",
    *,
    options: CollisionOptions | None = None,
    bos: bool | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> ContinuationScan:
    """For each prefix the states of all its continuations by one token, and all pairs of them.

    The prefix runs once; every token is tried on its keys and values. D(prefix, t) is each result's
    ``margin``. With ``out`` every prefix is kept in that run folder as it ends, and calling again continues.
    """
    chosen = replace(options or CollisionOptions(), **changes)
    at = parse_layer(layer, model.n_layers)
    ids = list(dict.fromkeys(encode_all(model, prefixes, bos)))
    for number, prefix in enumerate(ids):
        if model.max_length is not None and len(prefix) >= model.max_length:
            raise PromptError(
                f"Prefix {number} has {len(prefix)} tokens, as many as the model takes.",
                "Give a shorter one.",
            )
    require_above_noise(model, ids, (at,), chosen.thresholds)
    floor = noise_floor(model, (at,))[at]
    plan = {
        "command": "continuations",
        "model": model.identity.to_dict(),
        "prefixes": PromptSet(tuple(ids), "list", 0, 0).fingerprint,
        "layer": at,
        "options": chosen.to_dict(),
        "floors": safety(model.dtype),
    }
    run = Run(plan, out)
    structure = Structure(model, longest=max(map(len, ids)) + 1)
    found = {number: Continuation.from_dict(run.items[str(number)]) for number in run.done(range(len(ids)))}

    def scan(number: int) -> None:
        prefix = ids[number]
        states = _every_token(model, prefix, at)
        require_finite(states, f"Prefix {number}, layer {at}, token")
        spacing = measure_spacing(states, floor, _named_tokens(model, prefix, at, structure), chosen)
        found[number] = Continuation(prefix, model.decode(prefix), at, spacing)
        run.keep(number, found[number])

    run.each(range(len(ids)), scan, progress, "prefixes")
    scans = tuple(found[number] for number in range(len(ids)))
    result = ContinuationScan(model.identity.to_dict(), at, chosen.to_dict(), scans)
    run.finish(result.to_dict, {"prefixes": result.rows})
    return result


def closest_prompts(
    audit: CollisionAudit | str | Path, layer: Layer | None = None, count: int = 10
) -> list[tuple[int, ...]]:
    """The prompts of an audit's closest pairs, nearest first: the prefixes most worth continuing.

    ``audit`` may be the run folder of one; ``layer`` is by default the deepest it has.
    """
    if count < 1:
        raise OptionError(f"count is {count}.", "Give at least 1.")
    if isinstance(audit, CollisionAudit):
        found = audit.to_dict()
    else:
        document = read_json(Path(audit) / "run.json")
        if document.get("command") != "collisions" or document.get("state") != "done":
            raise RunFolderError(
                f"{audit} holds no finished collision search.", "Run preimage collisions --out there first."
            )
        found = document["results"]
    layers = {entry["layer"]: entry for entry in found["layers"]}
    if layer is not None and layer not in layers:
        raise OptionError(f"The audit has no layer {layer}.", f"It has {', '.join(map(str, layers))}.")
    closest = list(layers.values())[-1] if layer is None else layers[layer]
    pairs = closest["spacing"]["closest"]
    ids = [tuple(pair[end]) for pair in pairs for end in ("first_ids", "second_ids")]
    return list(dict.fromkeys(ids))[:count]


@torch.inference_mode()
def _every_token(
    model: LanguageModel, prefix: Sequence[int], layer: Layer
) -> Float[Tensor, "vocabulary d_model"]:
    """The state of every token after the prefix."""
    trial = model.prefix(layer)
    trial.extend(torch.tensor(prefix))
    states = torch.empty(model.vocab_size, model.d_model, dtype=model.dtype, device=model.device)
    for chunk in torch.arange(model.vocab_size).split(trial.max_candidates):
        states[chunk] = trial.try_tokens(chunk)
    return states


def _named_tokens(model: LanguageModel, prefix: tuple[int, ...], layer: Layer, structure: Structure) -> Named:
    """What the tokens after a prefix are; those that enter the model as one may have to have one state."""
    often = Counter(structure.same)
    twins = [token for token, first in enumerate(structure.same) if often[first] > 1]
    shown = ShownStructure(model, [(*prefix, token) for token in twins or [0]], (layer,), structure)
    keys = {token: shown.key((*prefix, token), layer) for token in twins}

    def explain(first: int, second: int, near: bool) -> str:
        if first in keys and keys[first] == keys.get(second):
            return IDENTICAL_EMBEDDINGS
        return UNEXPLAINED if near else ""

    return Named(
        ids=lambda row: (row,),
        text=lambda row: model.decode([row]),
        key=lambda row: keys.get(row, row),
        explain=explain,
    )
