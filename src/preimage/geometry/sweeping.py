"""The same measurement over models, prompt lengths, dtypes and quantisers, on equally many prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from preimage import models
from preimage.errors import OptionError, PromptError
from preimage.geometry.options import GeometryOptions, SweepOptions
from preimage.geometry.result import Geometry, GeometrySweep, Setting, SweptGeometry
from preimage.layers import LayerSpec, parse_layers
from preimage.preparation import Preparation
from preimage.progress import Listener, reporting, silent
from preimage.prompts import PromptOptions, PromptSet
from preimage.storage import Place, Run, current_workers, inside, place_of, write_table

_STATES = "states"  # in a run's folder, until it is done


def sweep_geometry(
    over: SweepOptions | Sequence[str | models.LanguageModel],
    source: str | Path | Sequence[str] = "default",
    *,
    layers: LayerSpec = "all",
    prompts: PromptOptions | None = None,
    options: GeometryOptions | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    progress: Listener = silent,
) -> GeometrySweep:
    """Every combination of models, lengths, dtypes and quantisers, one table.

    Nearest distances shrink with the number of prompts, so all runs must have equally many: the prompts of
    every model and length are gathered before the first run. The cost is that of the runs, one by one.

    ``over``: models alone are taken as they are. ``source`` and ``prompts``: where prompts come from and how
    they are drawn, as :func:`preimage.gather` takes them; lengths are those of the sweep. ``options``: how
    each run is measured (:func:`preimage.measure_geometry`). ``device``: where models given by name are
    loaded. ``out``: each run has its own run folder there (a single one that folder itself), states included
    until it is done; calling again continues.

    >>> from preimage import PromptOptions, SweepOptions
    >>> from preimage.models.scratch import new_model
    >>> model = new_model("gpt2", "tiny", vocabulary=50, max_length=8, device="cpu")
    >>> over = SweepOptions([model], lengths=(3, 5))
    >>> sweep = sweep_geometry(over, "random", layers=[2], prompts=PromptOptions(count=10))
    >>> [(run.setting.length, run.geometry.layers[2].pairs) for run in sweep.runs]
    [(3, 45), (5, 45)]
    """
    if not isinstance(over, SweepOptions):
        over = SweepOptions(
            list(over) if isinstance(over, list | tuple) else [cast(Any, over)]
        )  # or one alone
    chosen, dtypes = options or GeometryOptions(), over.dtypes
    quantisers = (chosen.quantiser,) if over.quantisers is None else over.quantisers
    prepared = [Preparation(model, dtype=dtypes[0], device=device, device_map=over.device_map)
                for model in over.models]  # fmt: skip
    asked = {length: replace(prompts or PromptOptions(), length=length) for length in over.lengths}
    _check(prepared, source, asked, layers)
    runs: list[SweptGeometry] = []
    single = len(prepared) * len(dtypes) * len(asked) * len(quantisers) == 1
    for one, dtype in product(prepared, dtypes):
        if one.files is None and dtype != dtypes[0]:
            continue  # a model in memory has one
        this = one.with_dtype(dtype)
        for length, quantiser in product(asked, quantisers):
            model = this.model
            setting = Setting(model.name, length, model.identity.dtype, quantiser.name)
            place = inside(out, "" if single else setting.name)
            run = replace(chosen, quantiser=quantiser)
            ids = this.prompts(source, asked[length])
            geometry = measure_model(model, ids, layers, options=run, out=place, progress=progress)
            runs.append(SweptGeometry(setting, model.identity.to_dict(), geometry))
    sweep = GeometrySweep(tuple(runs))
    if out is not None and not single:
        sweep.save(place_of(out) / "sweep.json")
        write_table(place_of(out) / "sweep.parquet", sweep.rows())
    return sweep


def measure_model(
    model: models.LanguageModel,
    prompts: PromptSet,
    layers: LayerSpec = "all",
    *,
    options: GeometryOptions | None = None,
    out: str | Path | Place | None = None,
    progress: Listener = silent,
) -> Geometry:
    """Capture the last states of prompts and measure them; with ``out``, continued or found done there."""
    from preimage.geometry.errands import GeometryJob  # which import torch
    from preimage.geometry.measuring import MeasuredLayers, measure_states, plan_of
    from preimage.states import capture_for_run

    chosen, wanted = options or GeometryOptions(), parse_layers(layers, model.n_layers)
    run = Run(plan_of(model.identity.to_dict(), prompts.ids, wanted, chosen), out)
    there = run.result(Geometry)
    if there is not None:
        run.finish(there.to_dict, {"layers": there.rows}, [_STATES])
        return there
    with reporting(progress) as report:
        states = capture_for_run(model, prompts, wanted, run.place(_STATES), report)
        errand = None if current_workers() is None else GeometryJob.errand(model, states, chosen)
        measured = MeasuredLayers(states, chosen, model.device, model, report, errand)
        return measure_states(measured, run, [_STATES])


def _check(
    prepared: Sequence[Preparation],
    source: str | Path | Sequence[str],
    asked: Mapping[int | None, PromptOptions],
    layers: LayerSpec,
) -> None:
    """Refuse layers that a model lacks, and prompts that are too few or not equally many."""
    counts: dict[tuple[str, int | None], int] = {}
    for one in prepared:
        one.layers(layers)
        counts |= {(one.name, length): len(one.prompts(source, asked[length])) for length in asked}
    if min(counts.values()) < 2:
        raise PromptError("One prompt makes no pair.", "Give at least two different ones.")
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{count} at {name}, {length}" for (name, length), count in counts.items())
        raise OptionError(
            f"Runs would have different numbers of prompts: {given}.", "Set count to the smallest."
        )
