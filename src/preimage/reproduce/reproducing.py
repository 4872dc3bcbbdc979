"""``preimage.reproduce``: one table or figure, measured."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from preimage.models import LanguageModel, require_model
from preimage.progress import Listener, reporting, silent
from preimage.reproduce.options import Sizes
from preimage.reproduce.registry import item_of
from preimage.reproduce.result import Reproduction
from preimage.storage import Place, place_of, plain, record, write_table, write_text


def reproduce(
    model: LanguageModel,
    name: str,
    preset: str = "small",
    *,
    sizes: Sizes | None = None,
    out: str | Path | Place | None = None,
    progress: Listener = silent,
    **changes: Any,
) -> Reproduction:
    """Measure an item of the papers (:data:`preimage.reproduce.ITEMS`) on a model.

    ``preset``: ``small`` (two cores, minutes) or ``full`` (one GPU); ``sizes``, or single fields of it, go
    before. With ``out`` the result is kept there as ``NAME.json``, its table as ``NAME.md`` and
    ``NAME.parquet``. A published figure stands beside every measured one; what differs in set-up is said.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> found = reproduce(model, "collisions", count=20, length=4, source="random")
    >>> found.rows[0].what, found.paper
    ('layer 0', 'arXiv 2510.15511')
    """
    require_model(model)
    item = item_of(name)
    chosen = replace(sizes or item.sizes(preset), **changes)
    began = time.perf_counter()
    with reporting(progress) as report:
        rows, raw = item.measure()(model, chosen, report)
    found = Reproduction(
        item=name,
        paper=item.paper,
        title=item.title,
        preset=preset,
        model=model.identity.to_dict(),
        options=chosen.to_dict(),
        rows=tuple(rows),
        differs=(f"Measured on {model.name}, {model.identity.dtype}, on {model.device}.", *item.differs),
        caveats=item.caveats,
        raw=plain(raw),
        seconds=time.perf_counter() - began,
        record=record() | {"command": [Path(sys.argv[0]).name, *sys.argv[1:]]},
    )
    if out is not None:
        place = place_of(out)
        found.save(place / f"{name}.json")
        write_table(place / f"{name}.parquet", found.table)
        write_text(place / f"{name}.md", found.markdown())
    return found
