"""The same search at several prompt lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from preimage.collisions.auditing import find_collisions
from preimage.collisions.result import CollisionAudit
from preimage.errors import OptionError
from preimage.layers import LayerSpec, parse_layers
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, gather


def sweep_lengths(
    model: LanguageModel,
    source: str,
    lengths: Sequence[int],
    layers: LayerSpec = "all",
    *,
    prompts: PromptOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> dict[int, CollisionAudit]:
    """An audit for each length, over equally many prompts: distances shrink with their number.

    ``source`` is a name that :func:`preimage.prompts.gather` knows, from which windows of each length are
    cut. With ``out`` each length has its own run folder there.
    """
    if not lengths:
        raise OptionError("No length was given.", "Give at least one.")
    parse_layers(layers, model.n_layers)
    limits: dict[str, Any] = {"vocab_size": model.vocab_size, "max_length": model.max_length}
    options = prompts or PromptOptions()
    # all are gathered before the first is run: a source too small for one length is refused at once
    sets = {n: gather(source, model.tokenizer, replace(options, length=n), **limits) for n in lengths}
    if len({len(found) for found in sets.values()}) > 1:
        given = ", ".join(f"{len(found)} at {length}" for length, found in sets.items())
        raise OptionError(f"The source has {given} prompts.", "Set count to the smallest of these numbers.")
    return {
        length: find_collisions(
            model,
            found,
            layers,
            out=None if out is None else Path(out) / f"length-{length}",
            progress=progress,
            **changes,
        )
        for length, found in sets.items()
    }
