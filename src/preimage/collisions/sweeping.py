"""The same search at several prompt lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from preimage.collisions.auditing import find_collisions
from preimage.collisions.options import CollisionOptions
from preimage.collisions.result import CollisionAudit
from preimage.errors import OptionError
from preimage.layers import LayerSpec
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptSet


def sweep_lengths(
    model: LanguageModel,
    prompts: Mapping[int, PromptSet],
    layers: LayerSpec = "all",
    *,
    options: CollisionOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> dict[int, CollisionAudit]:
    """An audit for each length, over equally many prompts: distances shrink with their number.

    ``prompts``: by their length in tokens. With ``out`` each length has its own run folder there.
    """
    if len({len(some) for some in prompts.values()}) != 1:
        given = ", ".join(f"{len(some)} at {length}" for length, some in prompts.items()) or "no"
        raise OptionError(f"The source has {given} prompts.", "Set count to the smallest of these numbers.")
    return {
        length: find_collisions(
            model, some, layers, options=options,
            out=None if out is None else Path(out) / f"length-{length}", progress=progress,
        )
        for length, some in prompts.items()
    }  # fmt: skip
