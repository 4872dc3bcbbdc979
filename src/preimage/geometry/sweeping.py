"""The same measurement over models, prompt lengths, dtypes and quantisers, on equally many prompts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from preimage.errors import OptionError, PromptError
from preimage.geometry.measuring import measure_geometry, plan_of
from preimage.geometry.options import GeometryOptions
from preimage.geometry.quantisers import Quantiser
from preimage.geometry.result import Geometry, GeometrySweep, Setting, SweptGeometry
from preimage.layers import LayerSpec, parse_layers
from preimage.models import LanguageModel, ModelPreview, load, read_preview
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, PromptSet, gather
from preimage.states import capture
from preimage.storage import Run, write_table

_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}


def sweep_geometry(
    models: Sequence[str | LanguageModel],
    source: str | Path | Sequence[str] = "default",
    *,
    lengths: Sequence[int | None] = (None,),
    dtypes: Sequence[str] = ("float32",),
    quantisers: Sequence[Quantiser] | None = None,
    layers: LayerSpec = "all",
    prompts: PromptOptions | None = None,
    options: GeometryOptions | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    progress: Progress = silent,
) -> GeometrySweep:
    """Every combination of what is given, one table.

    Nearest distances shrink with the number of prompts, so all runs must have equally many: ``source`` and
    ``prompts`` (:func:`preimage.prompts.gather`) are read for every model and length before the first is
    run. A model in memory keeps its dtype. With ``out`` each run has its own run folder there (a single
    one that folder itself), states included until it is done, and calling again continues.
    """
    if not (models and lengths and dtypes) or quantisers == ():
        raise OptionError("A sweep over nothing.", "Give at least one model, length, dtype and quantiser.")
    chosen = options or GeometryOptions()
    if len(models) == len(dtypes) == 1 and isinstance(models[0], str) and read_preview(models[0]) is None:
        models = [load(models[0], dtype=dtypes[0], device=device)]  # once, for its sizes and for the states
    sets = _gather(models, source, lengths, layers, prompts or PromptOptions(), device)
    runs: list[SweptGeometry] = []
    kinds = quantisers or (chosen.quantiser,)
    single = len(models) * len(dtypes) * len(lengths) * len(kinds) == 1
    for given, dtype in product(models, dtypes):
        if isinstance(given, LanguageModel) and dtype != dtypes[0]:
            continue  # it has one
        model = load(given, dtype=dtype, device=device)
        for length, quantiser in product(lengths, kinds):
            run = replace(chosen, quantiser=quantiser)
            kind = f"{quantiser.granularity}-{quantiser.range}"
            setting = Setting(model.name, length, model.identity.dtype, kind)
            place = None if out is None else Path(out) / ("" if single else setting.name)
            ids = sets[_name(given), length]
            found = measure_model(model, ids, layers, options=run, out=place, progress=progress)
            runs.append(SweptGeometry(setting, model.identity.to_dict(), found))
    sweep = GeometrySweep(tuple(runs))
    if out is not None and not single:
        sweep.save(Path(out) / "sweep.json")
        write_table(Path(out) / "sweep.parquet", sweep.rows())
    return sweep


def measure_model(
    model: LanguageModel,
    prompts: PromptSet,
    layers: LayerSpec = "all",
    *,
    options: GeometryOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> Geometry:
    """Capture the last states of prompts and measure them; with ``out``, continued or found done there."""
    chosen, wanted = options or GeometryOptions(), parse_layers(layers, model.n_layers)
    run = Run(plan_of(model.identity.to_dict(), prompts.ids, wanted, chosen), out)
    if run.results is not None:
        return Geometry.from_dict(run.results)
    bundle = run.place("states")
    batch = _BATCH_TOKENS.get(model.device.type, _BATCH_TOKENS["cpu"])
    states = capture(
        model, prompts, wanted, positions="last", batch_tokens=batch, out=bundle, progress=progress
    )
    found = measure_geometry(
        states, options=chosen, model=model, device=model.device, out=out, progress=progress
    )
    if bundle is not None:
        shutil.rmtree(bundle, ignore_errors=True)
    return found


def _gather(
    models: Sequence[str | LanguageModel],
    source: str | Path | Sequence[str],
    lengths: Sequence[int | None],
    layers: LayerSpec,
    options: PromptOptions,
    device: str,
) -> dict[tuple[str, int | None], PromptSet]:
    """The prompts of every model and length, equally many."""
    sets: dict[tuple[str, int | None], PromptSet] = {}
    for model in models:
        known: LanguageModel | ModelPreview | None = model if isinstance(model, LanguageModel) else None
        known = known or read_preview(str(model)) or load(model, device=device)
        parse_layers(layers, known.n_layers)
        for length in lengths:
            sets[_name(model), length] = gather(
                source,
                known.tokenizer,
                replace(options, length=length),
                vocab_size=known.vocab_size,
                max_length=known.max_length,
            )
    if any(len(found) < 2 for found in sets.values()):
        raise PromptError("One prompt makes no pair.", "Give at least two different ones.")
    if len({len(found) for found in sets.values()}) > 1:
        given = ", ".join(f"{len(found)} at {name}, {length}" for (name, length), found in sets.items())
        raise OptionError(
            f"Runs would have different numbers of prompts: {given}.", "Set count to the smallest."
        )
    return sets


def _name(model: str | LanguageModel) -> str:
    return model.name if isinstance(model, LanguageModel) else model
