"""``preimage.find_collisions``: every pair of a set of prompts, layer by layer; and at several lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from preimage.collisions.errands import STATES, AuditJob, screen_elsewhere
from preimage.collisions.layer_audit import LayerAudit
from preimage.collisions.options import CollisionChanges, CollisionOptions
from preimage.collisions.result import CollisionAudit, LayerCollisions
from preimage.collisions.spacing import require_above_noise
from preimage.collisions.tiles import KeptTiles
from preimage.distances import here
from preimage.errors import OptionError, PromptError
from preimage.layers import Layer, LayerSpec, parse_layers
from preimage.models import LanguageModel, require_model
from preimage.progress import Listener, Progress, reporting, silent
from preimage.prompts import PromptSet
from preimage.states import capture_for_run, encode_all, safety
from preimage.storage import Place, Run, current_workers, inside


def find_collisions(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int]] | PromptSet,
    layers: LayerSpec = "all",
    *,
    options: CollisionOptions | None = None,
    bos: bool | None = None,
    out: str | Path | Place | None = None,
    progress: Listener = silent,
    **changes: Unpack[CollisionChanges],
) -> CollisionAudit:
    """Compare the last states of all prompts, pair by pair, at every layer, and hard pairs beside them.

    ``prompts``: texts or token ids; those with equal ids count once. ``layers``: 0..L, "final", or a list of
    them. ``options`` or single fields of it: see :class:`CollisionOptions`. ``bos``: whether to put BOS in
    front of texts; by default as the tokenizer does. With ``out`` every layer is kept in that run folder as
    it ends, and calling again continues it. Cost: a pass over all prompts and, for each layer, the certified
    distances of all n (n - 1) / 2 pairs; one layer's last states (n x d_model) are held at a time.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> audit = find_collisions(model, [[1, 2], [3, 2], [4, 5, 6]], layers=[0, 1], hard_bases=0)
    >>> audit.at(0).spacing.explained, audit.at(1).spacing.within_noise, audit.unexplained
    ({'same last token at layer 0': 1}, 0, 0)
    """
    require_model(model)
    chosen = replace(options or CollisionOptions(), **changes)
    wanted = parse_layers(layers, model.n_layers)
    given = encode_all(model, prompts, bos)
    source = prompts if isinstance(prompts, PromptSet) else PromptSet((), "list", chosen.seed, 0)
    ids = replace(source, ids=tuple(dict.fromkeys(given)))
    if len(ids) < 2:
        raise PromptError(
            f"{len(given)} prompts, {len(ids)} of them different.", "Give at least two different ones."
        )
    require_above_noise(model, ids.ids, wanted, chosen.thresholds)
    plan = {
        "command": "collisions",
        "model": model.identity.to_dict(),
        "prompts": ids.fingerprint,
        "layers": list(wanted),
        "options": chosen.to_dict(),
        "noise_floors": safety(model.dtype),  # so many are noise; layers judged by another number do not mix
    }
    run = Run(plan, out)
    with reporting(progress) as report:
        finished = _compare(model, ids, wanted, chosen, run, report)
    lengths = ids.lengths
    result = CollisionAudit(
        model=model.identity.to_dict(),
        prompts=len(ids),
        duplicates_removed=ids.duplicates_removed + len(given) - len(ids),
        lengths=(min(lengths), max(lengths)),
        source=ids.source,
        fingerprint=ids.fingerprint,
        options=chosen.to_dict(),
        layers=tuple(finished[layer] for layer in wanted),
    )
    run.finish(result.to_dict, {"layers": result.rows}, remove=[STATES])
    return result


def sweep_lengths(
    model: LanguageModel,
    prompts: Mapping[int, PromptSet],
    layers: LayerSpec = "all",
    *,
    options: CollisionOptions | None = None,
    out: str | Path | None = None,
    progress: Listener = silent,
) -> dict[int, CollisionAudit]:
    """An audit for each length, over equally many prompts: distances shrink with their number.

    ``prompts``: by their length in tokens. With ``out`` each length has its own run folder there. The rest is
    as in :func:`find_collisions`.
    """
    if len(set(map(len, prompts.values()))) != 1:
        given = ", ".join(f"{len(ids)} at {length}" for length, ids in prompts.items()) or "no"
        raise OptionError(f"The source has {given} prompts.", "Set count to the smallest of these numbers.")
    audits = {}
    for length, ids in prompts.items():
        place = inside(out, f"length-{length}")
        audits[length] = find_collisions(model, ids, layers, options=options, out=place, progress=progress)
    return audits


def _compare(
    model: LanguageModel,
    ids: PromptSet,
    layers: Sequence[Layer],
    options: CollisionOptions,
    run: Run,
    progress: Progress,
) -> dict[Layer, LayerCollisions]:
    """Every layer: what was kept of it, or what is found now, here or elsewhere."""
    left = run.left(layers)
    if not left:
        return run.kept(layers, LayerCollisions)
    audit = LayerAudit(model, ids, layers, options)
    prompts = capture_for_run(model, ids, layers, run.place(f"{STATES}/prompts"), progress)
    hard = None
    if audit.hard_prompts:
        hard = capture_for_run(model, audit.hard_prompts, layers, run.place(f"{STATES}/hard"), progress)
    audit.use(prompts, hard)
    errand = None
    if current_workers() is not None:
        errand = AuditJob.errand(audit, prompts, hard, run)
        screen_elsewhere(errand, left, len(ids), run, progress)

    def compare(keys: tuple[Layer, ...]) -> Iterator[LayerCollisions]:
        for layer in keys:
            tiles = KeptTiles.of(run.shelf, layer)
            yield audit.at(layer, tiles or here)
            KeptTiles.forget(run, layer)  # it is kept now

    return run.each(layers, LayerCollisions, compare, progress, "layers compared", errand=errand)
