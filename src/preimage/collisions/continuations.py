"""``preimage.scan_continuations``: every vocabulary token after a prefix, compared with every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from preimage.collisions.errands import PrefixJob
from preimage.collisions.options import CollisionChanges, CollisionOptions
from preimage.collisions.prefixes import PrefixScan
from preimage.collisions.result import CollisionAudit, Continuation, ContinuationScan
from preimage.collisions.spacing import require_above_noise
from preimage.errors import OptionError, PromptError, RunFolderError
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel, require_model
from preimage.progress import Listener, reporting, silent
from preimage.prompts import PromptSet
from preimage.states import encode_all, safety
from preimage.storage import Run, current_workers, read_json


def scan_continuations(
    model: LanguageModel,
    prefixes: Sequence[str | Sequence[int]] | PromptSet,
    layer: Layer | str = "final",
    *,
    options: CollisionOptions | None = None,
    bos: bool | None = None,
    out: str | Path | None = None,
    progress: Listener = silent,
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
    require_model(model)
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
    plan = {
        "command": "continuations",
        "model": model.identity.to_dict(),
        "prefixes": PromptSet(tuple(ids), "list", 0, 0).fingerprint,
        "layer": at,
        "options": chosen.to_dict(),
        "noise_floors": safety(model.dtype),
    }
    run = Run(plan, out)
    scan = PrefixScan(model, ids, at, chosen)
    errand = None if current_workers() is None else PrefixJob.errand(scan)
    numbers = range(len(ids))
    with reporting(progress) as report:
        scans = run.each(
            numbers, Continuation, lambda some: map(scan.at, some), report, "prefixes", errand=errand
        )
    in_order = tuple(scans[number] for number in numbers)
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
