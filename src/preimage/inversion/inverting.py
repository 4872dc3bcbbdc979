"""``preimage.invert``: which prompt made these states?"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from preimage.inversion.engine.verifier import FAR
from preimage.inversion.errands import InvertJob
from preimage.inversion.inverter import Inverter
from preimage.inversion.options import InvertChanges, InvertOptions
from preimage.inversion.preparing import Prepared, prepare
from preimage.inversion.result import Inversion
from preimage.models import LanguageModel, require_model
from preimage.progress import Listener, Progress, reporting, silent, told_of_stages
from preimage.storage import Run, current_workers


def invert(
    model: LanguageModel,
    states: Any,
    layer: int | str | None = None,
    *,
    attention_mask: Any = None,
    options: InvertOptions | None = None,
    out: str | Path | None = None,
    progress: Listener = silent,
    **changes: Unpack[InvertChanges],
) -> list[Inversion]:
    """Recover every prompt from its states at one layer.

    ``states``: captured by ``model``, or whatever :func:`preimage.states_from` takes: tensors, arrays, lists
    of them, ``outputs.hidden_states``, ``past_key_values``, with ``attention_mask``. ``layer`` may be left
    out where they hold one layer. ``changes`` are fields of ``options``, such as ``observe="keys"`` (what
    was seen), ``prefix="…"`` (known text before the first state), ``lens="my.safetensors"`` (which lens
    proposes) or ``method="brute-force"``. One result a prompt, in their order; with ``out``, a run folder,
    each is kept there as it is found, and calling again continues. What is ``recovered`` was verified against
    the states, position by position and as a whole. States of another model or layer are not refused here:
    they come back as ``not_recovered`` (``states.require_made_by(model)`` refuses them at once), with what
    they look like.

    Cost: about two forward passes over a prompt with a lens; at worst a test of the whole vocabulary at every
    position. The first call for a model and layer also measures noise and builds what proposes.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> states = preimage.capture(model, [[7, 3, 9]], layers=1)
    >>> (result,) = preimage.invert(model, states, proposers="prior")
    >>> result.status, result.token_ids
    ('recovered', (7, 3, 9))
    """
    require_model(model)
    chosen = replace(options or InvertOptions(), **changes)
    with model.unchanging(), reporting(progress) as report:
        return _invert(model, states, layer, attention_mask, chosen, out, report)


def _invert(
    model: LanguageModel,
    x: Any,
    layer: int | str | None,
    attention_mask: Any,
    options: InvertOptions,
    out: str | Path | None,
    progress: Progress,
) -> list[Inversion]:
    began = time.perf_counter()
    with told_of_stages(progress):
        prepared = prepare(model, x, layer, attention_mask, options)
    states, work = prepared.states, Inverter(model, prepared, options)
    run = Run({} if out is None else _plan(model, prepared, options), out)
    left, errand = run.left(range(len(states))), None
    if current_workers() is not None and len(left) > 1:
        errand = InvertJob.errand(model, prepared, options)
        groups = work.grouped(left)  # workers make themselves ready
    else:
        with told_of_stages(progress):
            groups = work.batches(left)
    work.setup_seconds = time.perf_counter() - began
    results = run.each(
        range(len(states)), Inversion, lambda some: work.invert(some, progress), progress,
        "prompts inverted", groups=groups, errand=errand,
    )  # fmt: skip
    in_order = [results[index] for index in range(len(states))]
    run.finish(lambda: [result.to_dict() for result in in_order])
    return in_order


def _plan(model: LanguageModel, prepared: Prepared, options: InvertOptions) -> dict[str, Any]:
    """What a run folder is for; computed for one alone, as all states are read for it."""
    at = prepared.verifier.layer
    return {
        "command": "invert",
        "model": model.identity.to_dict(),
        "states": prepared.states.fingerprint(at),
        "layer": at,
        "options": options.to_dict(),
        "far": FAR,  # results judged by another line, or by none, do not mix
    }
