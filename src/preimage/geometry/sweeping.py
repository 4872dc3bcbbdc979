"""The same measurement over models, prompt lengths, dtypes and quantisers, on equally many prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from preimage.devices import BATCH_TOKENS, by_device
from preimage.errors import OptionError, PromptError
from preimage.geometry.measuring import MeasuredLayers, measure_states, plan_of
from preimage.geometry.options import GeometryOptions, SweepOptions
from preimage.geometry.result import Geometry, GeometrySweep, Setting, SweptGeometry
from preimage.layers import LayerSpec, parse_layers
from preimage.models import LanguageModel, ModelPreview, load, read_preview
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, PromptSet, gather
from preimage.states import capture
from preimage.storage import Run, write_table


def sweep_geometry(
    over: SweepOptions | Sequence[str | LanguageModel],
    source: str | Path | Sequence[str] = "default",
    *,
    layers: LayerSpec = "all",
    prompts: PromptOptions | None = None,
    options: GeometryOptions | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    progress: Progress = silent,
) -> GeometrySweep:
    """Every combination of models, lengths, dtypes and quantisers, one table.

    Nearest distances shrink with the number of prompts, so all runs must have equally many: the prompts of
    every model and length are gathered before the first run. The cost is that of the runs, one by one.

    Args:
        over: what the sweep goes over; models alone are taken as they are.
        source: of the prompts, and
        prompts: how they are drawn, as :func:`preimage.gather` takes them; lengths are those of the sweep.
        layers: which to measure.
        options: how each run is measured (:func:`preimage.measure_geometry`).
        device: where models given by name are loaded.
        out: each run has its own run folder there (a single one that folder itself), states included until
            it is done; calling again continues.
        progress: told of every capture and layer.

    >>> from preimage import PromptOptions, SweepOptions
    >>> from preimage.models.scratch import new_model
    >>> model = new_model("gpt2", "tiny", vocabulary=50, max_length=8, device="cpu")
    >>> over = SweepOptions([model], lengths=(3, 5))
    >>> sweep = sweep_geometry(over, "random", layers=[2], prompts=PromptOptions(count=10))
    >>> [(run.setting.length, run.geometry.layers[2].pairs) for run in sweep.runs]
    [(3, 45), (5, 45)]
    """
    if not isinstance(over, SweepOptions):
        over = SweepOptions(over)
    chosen = options or GeometryOptions()
    models, lengths, dtypes = over.models, over.lengths, over.dtypes
    quantisers = (chosen.quantiser,) if over.quantisers is None else over.quantisers
    if len(models) == len(dtypes) == 1 and isinstance(models[0], str) and read_preview(models[0]) is None:
        models = [load(models[0], dtype=dtypes[0], device=device)]  # once, for its sizes and for the states
    sets = _gather(models, source, lengths, layers, prompts or PromptOptions(), device)
    runs: list[SweptGeometry] = []
    single = len(models) * len(dtypes) * len(lengths) * len(quantisers) == 1
    for given, dtype in product(models, dtypes):
        if isinstance(given, LanguageModel) and dtype != dtypes[0]:
            continue  # it has one
        model = load(given, dtype=dtype, device=device)
        for length, quantiser in product(lengths, quantisers):
            setting = Setting(model.name, length, model.identity.dtype, quantiser.name)
            place = None if out is None else Path(out) / ("" if single else setting.name)
            geometry = measure_model(
                model,
                sets[_name(given), length],
                layers,
                options=replace(chosen, quantiser=quantiser),
                out=place,
                progress=progress,
            )
            runs.append(SweptGeometry(setting, model.identity.to_dict(), geometry))
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
    states = capture(
        model,
        prompts,
        wanted,
        positions="last",
        batch_tokens=by_device(BATCH_TOKENS, model.device),
        out=run.place("states"),
        progress=progress,
    )
    return measure_states(MeasuredLayers(states, chosen, model.device, model, progress), run, ["states"])


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
    counts = {place: len(prompts) for place, prompts in sets.items()}
    if min(counts.values()) < 2:
        raise PromptError("One prompt makes no pair.", "Give at least two different ones.")
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{count} at {name}, {length}" for (name, length), count in counts.items())
        raise OptionError(
            f"Runs would have different numbers of prompts: {given}.", "Set count to the smallest."
        )
    return sets


def _name(model: str | LanguageModel) -> str:
    return model.name if isinstance(model, LanguageModel) else model
