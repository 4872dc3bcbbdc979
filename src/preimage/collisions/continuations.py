"""``preimage.scan_continuations``: every vocabulary token after a prefix, compared with every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.collisions.confirmation import ConfirmedStructure
from preimage.collisions.options import CollisionChanges, CollisionOptions
from preimage.collisions.result import CollisionAudit, Continuation, ContinuationScan
from preimage.collisions.spacing import RowLabels, measure_spacing, require_above_noise
from preimage.collisions.structure import IDENTICAL_EMBEDDINGS, UNEXPLAINED, Structure
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
    **changes: Unpack[CollisionChanges],
) -> ContinuationScan:
    """For each prefix the states of all its continuations by one token, and all pairs of them.

    ``prefixes``: texts or token ids; the other arguments are as in :func:`find_collisions`. D(prefix, t) is
    each result's ``margin``. With ``out`` every prefix is kept in that run folder as it ends, and calling
    again continues. Cost: each prefix runs once and every token on its keys and values; then the certified
    distances of all pairs of tokens, whose states (vocabulary x d_model) are held at once.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> scan = scan_continuations(model, [[1, 2, 3]], layer=1)
    >>> scan.prefixes[0].spacing.pairs, scan.prefixes[0].margin > 0, scan.unexplained
    (120, True, 0)
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
        "noise_floors": safety(model.dtype),
    }
    run = Run(plan, out)
    structure = Structure(model, longest=max(map(len, ids)) + 1)
    scans = run.kept(range(len(ids)), Continuation)

    def scan(number: int) -> None:
        prefix = ids[number]
        states = _every_token(model, prefix, at)
        require_finite(states, f"Prefix {number}, layer {at}, token")
        spacing = measure_spacing(states, floor, _token_labels(model, prefix, at, structure), chosen)
        scans[number] = Continuation(prefix, model.decode(prefix), at, spacing)
        run.keep(number, scans[number])

    run.each(range(len(ids)), scan, progress, "prefixes")
    in_order = tuple(scans[number] for number in range(len(ids)))
    result = ContinuationScan(model.identity.to_dict(), at, chosen.to_dict(), in_order)
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
    if not isinstance(audit, CollisionAudit):
        document = read_json(Path(audit) / "run.json")
        if document.get("command") != "collisions" or document.get("state") != "done":
            raise RunFolderError(
                f"{audit} holds no finished collision search.", "Run preimage collisions --out there first."
            )
        audit = CollisionAudit.from_dict(document["results"])
    layers = {one.layer: one for one in audit.layers}
    if layer is not None and layer not in layers:
        raise OptionError(f"The audit has no layer {layer}.", f"It has {', '.join(map(str, layers))}.")
    closest = (audit.layers[-1] if layer is None else layers[layer]).spacing.closest
    ids = (ids for pair in closest for ids in (pair.first_ids, pair.second_ids))
    return list(dict.fromkeys(ids))[:count]


@torch.inference_mode()
def _every_token(
    model: LanguageModel, prefix: Sequence[int], layer: Layer
) -> Float[Tensor, "vocabulary d_model"]:
    """The state of every token after the prefix."""
    cached = model.prefix(layer)
    cached.extend(torch.tensor(prefix))
    states = torch.empty(model.vocab_size, model.d_model, dtype=model.dtype, device=model.device)
    for chunk in torch.arange(model.vocab_size).split(cached.max_candidates):
        states[chunk] = cached.try_tokens(chunk)
    return states


def _token_labels(
    model: LanguageModel, prefix: tuple[int, ...], layer: Layer, structure: Structure
) -> RowLabels:
    """What the tokens after a prefix are; those that enter the model as one may have to have one state."""
    often = Counter(structure.same)
    twins = [token for token, first in enumerate(structure.same) if often[first] > 1]
    confirmed = ConfirmedStructure(model, [(*prefix, token) for token in twins or [0]], (layer,), structure)
    keys = {token: confirmed.key((*prefix, token), layer) for token in twins}

    def explain(first: int, second: int, near: bool) -> str:
        if first in keys and keys[first] == keys.get(second):
            return IDENTICAL_EMBEDDINGS
        return UNEXPLAINED if near else ""

    return RowLabels(
        ids=lambda row: (row,),
        text=lambda row: model.decode([row]),
        key=lambda row: keys.get(row, row),
        explain=explain,
    )
