"""``preimage geometry``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli import DONE, FINDINGS
from preimage.cli import arguments as arg
from preimage.cli.elsewhere import (
    ClusterAddress,
    OnlyPlan,
    WorkerCount,
    check_cluster,
    load_seconds,
    planned_workers,
    show_plan,
    working_on,
)
from preimage.cli.ending import print_written
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar
from preimage.errors import OptionError
from preimage.geometry.quantiser import GRANULARITIES, RANGES
from preimage.storage import read_manifest

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from preimage.geometry import GeometryOptions, SweepOptions
    from preimage.geometry.result import Geometry, GeometrySweep
    from preimage.prompts import PromptOptions

_Lengths = Annotated[str | None, typer.Option(help="Windows of so many tokens; 8,16,32: one after another.")]
_Granularities = Annotated[
    str, typer.Option(help=f"A step for each {' or '.join(GRANULARITIES)}; several: layer,channel.")
]
_Ranges = Annotated[
    str, typer.Option("--range", help=f"Of the codes: {' or '.join(RANGES)}; several: absmax,minmax.")
]
_Propagate = Annotated[
    bool, typer.Option("--propagate", help="Every block is given the quantised states below it.")
]


def geometry(
    bundle: Annotated[Path | None, typer.Argument(help="A state bundle with its token ids.")] = None,
    model: Annotated[str, typer.Option(help="Alias, hub id, folder or GGUF file; a,b: several.")] = "smollm2",
    text: arg.Texts = None,
    prompts: arg.Source = None,
    count: arg.Count = None,
    length: _Lengths = None,
    seed: arg.Seed = 0,
    bos: arg.Bos = None,
    layers: arg.Layers = "all",
    bits: arg.Bits = "8,4",
    granularity: _Granularities = "layer",
    value_range: _Ranges = "absmax",
    percentile: Annotated[float, typer.Option(help="Of |h|, for --range percentile.")] = 99.9,
    propagate: _Propagate = False,
    quantile: Annotated[float, typer.Option(help="Of the prompts' own margins and ratios.")] = 0.01,
    subsets: Annotated[int, typer.Option(help="Random tenths of the prompts for intervals; 0: none.")] = 20,
    out: arg.Out = None,
    cluster: ClusterAddress = None,
    workers: WorkerCount = None,
    plan: OnlyPlan = False,
    figures: arg.Figures = "html",
    dtype: Annotated[str, typer.Option(help="float32, float64, bf16, fp16, auto; or several.")] = "float32",
    device: arg.Device = "auto",
    device_map: arg.DeviceMap = None,
    json: arg.Json = False,
) -> int:
    """Margins, co-Lipschitz constants and near-collisions, layer by layer, in full and in few bits.

    Lists of models, lengths, dtypes, granularities or ranges give a sweep: every combination, one table.
    """
    check_cluster(cluster, workers, plan=plan)
    if bundle is not None:
        if cluster or plan:
            raise OptionError("A bundle is measured here.", "Leave out --cluster and --plan.")
        _check_bundle(
            bundle,
            prompts=text or prompts or count or length,
            model=propagate or "," in granularity + value_range,
        )
    if text and prompts:
        raise OptionError("--text and --prompts: both given.", "Give one of them.")
    lengths: list[int | None] = [None]
    if length is not None:
        hint = "Give a number of tokens, or several: 8,16,32."
        lengths = [*arg.whole_numbers("--length", length, hint)]
    from preimage.figures import parse_formats

    formats = parse_formats(figures)
    from preimage.geometry import GeometryOptions, Quantiser, SweepOptions, sweep_geometry
    from preimage.models import check_device, check_dtype
    from preimage.prompts import PromptOptions

    quantisers = [
        Quantiser(granularity=each, range=of, percentile=percentile)
        for each in _listed(granularity)
        for of in _listed(value_range)
    ]
    options = GeometryOptions(
        bits=arg.parse_bits(bits), quantile=quantile, quantiser=quantisers[0], propagate=propagate,
        subsets=subsets, seed=seed,
    )  # fmt: skip
    dtypes = [check_dtype(one) for one in _listed(dtype)]
    check_device(device)
    if bundle is not None:
        return _of_bundle(bundle, options, device, out, formats, json)
    choice = arg.PromptChoice(text, prompts, count).unless_told(arg.MANY)
    chosen = PromptOptions(count=choice.count, seed=seed, bos=bos)
    over = SweepOptions(_listed(model), lengths, dtypes, quantisers, device_map)
    source = list(text) if text else str(choice.source)
    if plan:
        _show_plan(over, source, chosen, layers, options, device, planned_workers(workers), json)
        return DONE
    with working_on(cluster, workers, device), progress_bar() as progress:
        sweep = sweep_geometry(
            over, source, layers=layers, prompts=chosen, options=options,
            device=device, out=out, progress=progress,
        )  # fmt: skip
    _finish_sweep(sweep, out, formats, json)
    return _exit_code(run.geometry for run in sweep.runs)


def _show_plan(
    over: SweepOptions,
    source: str | list[str],
    prompts: PromptOptions,
    layers: str,
    options: GeometryOptions,
    device: str,
    workers: int,
    json: bool,
) -> None:
    """What the first setting of a sweep would cost; the others are like it."""
    from preimage.planning import plan_geometry
    from preimage.preparation import Preparation

    first = Preparation(over.models[0], dtype=over.dtypes[0], device=device, device_map=over.device_map)
    wanted, model = first.layers(layers), first.model
    ids = first.prompts(source, replace(prompts, length=over.lengths[0]))
    show_plan(
        plan_geometry(model, ids.lengths, wanted, options, load_seconds=load_seconds(), workers=workers), json
    )


def _check_bundle(bundle: Path, *, prompts: object, model: object) -> None:
    """Refuse what does not go with a bundle, and one that cannot be read."""
    if prompts:
        raise OptionError("A bundle and prompts were given.", "Give one of them.")
    if model:
        raise OptionError("--propagate and sweeps need the model and its prompts.", "Give no bundle.")
    read_manifest(bundle)


def _of_bundle(
    bundle: Path,
    options: GeometryOptions,
    device: str,
    out: Path | None,
    formats: tuple[str, ...],
    json: bool,
) -> int:
    """The geometry of states that were kept."""
    from preimage.geometry import measure_geometry
    from preimage.models.loading import parse_device
    from preimage.states.bundle import open_bundle

    states, on = open_bundle(bundle, read_manifest(bundle)), parse_device(device)
    with progress_bar() as progress:
        shape = measure_geometry(states, options=options, device=on, out=out, progress=progress)
    _finish(shape, states.model, out, formats, json)
    return _exit_code([shape])


def _exit_code(shapes: Iterable[Geometry]) -> int:
    """Fewer bits are meant to collide; collisions in full precision that nothing explains are not."""
    return FINDINGS if any(shape.unexplained for shape in shapes) else DONE


def _finish(
    shape: Geometry, model: dict[str, object] | None, out: Path | None, formats: tuple[str, ...], json: bool
) -> None:
    from preimage.figures import made_now, save_figures

    if out is not None:
        save_figures(_figures(shape), out, formats, made_now(model))
    if json:
        print_result("geometry", {"model": model, **shape.to_dict()})
        return
    for name, rows in _tables(shape).items():
        print_table(name, _COLUMNS, rows)
    _show_unexplained("", shape)
    print_written(out, first="layers")


def _show_unexplained(name: str, shape: Geometry) -> None:
    for layer, one in shape.layers.items():
        if one.unexplained:
            print_lines(f"{name}layer {layer}: {one.unexplained} collisions in full precision, UNEXPLAINED")


def _finish_sweep(sweep: GeometrySweep, out: Path | None, formats: tuple[str, ...], json: bool) -> None:
    from preimage.figures import family_figure, layer_figure, length_figure, made_now, save_figures

    if len(sweep.runs) == 1:
        _finish(sweep.runs[0].geometry, sweep.runs[0].identity, out, formats, json)
        return
    if out is not None:
        every: dict[str, Geometry] = {run.setting.name: run.geometry for run in sweep.runs}
        together = {"layers": layer_figure(every), "depth": family_figure(every)}
        by_length = sweep.by_length()
        if by_length:
            together["lengths"] = length_figure(by_length)
        save_figures(together, out, formats, made_now(*(run.identity for run in sweep.runs)))
        for run in sweep.runs:
            save_figures(_figures(run.geometry), out / run.setting.name, formats, made_now(run.identity))
    if json:
        print_result("geometry", sweep.to_dict())
        return
    for run in sweep.runs:
        for name, rows in _tables(run.geometry).items():
            print_table(f"{run.setting.name}: {name}", _COLUMNS, rows[-1:])
        _show_unexplained(f"{run.setting.name}: ", run.geometry)
    print_written(out, first="layers")


def _figures(shape: Geometry) -> dict[str, go.Figure]:
    from preimage.figures import family_figure, layer_figure, near_collision_figure, quantised_figure

    alone = {f"{shape.prompts} prompts": shape}
    drawn = {"layers": layer_figure(alone), "depth": family_figure(alone)}
    drawn["near-collisions"] = near_collision_figure(shape)
    if shape.quantised:
        drawn["quantised"] = quantised_figure(shape)
    return drawn


def _listed(given: str) -> list[str]:
    return [part.strip() for part in given.split(",")]


_COLUMNS = ["layer", "mean norm", "margin", "quantile", "/ norm", "co-Lipschitz", "quantile", "/ norm",
            "x length", "distortion", "dimension", "collisions"]  # fmt: skip


def _tables(shape: Geometry) -> dict[str, list[list[str]]]:
    """Rows by title, one table a precision."""
    tables = {}
    for name, layers in shape.sets.items():
        rows = []
        for layer, one in layers.items():
            numbers = (
                one.mean_norm, one.margin, one.margin_quantile, one.normalised_margin_quantile,
                one.colipschitz, one.colipschitz_quantile, one.normalised_colipschitz_quantile,
                one.length_colipschitz_quantile, one.distortion, one.intrinsic_dimension,
            )  # fmt: skip
            shown = ["-" if number is None else f"{number:.3g}" for number in numbers]
            rows.append([str(layer), *shown, str(one.collisions)])
        quantile = f"{100 * shape.options['quantile']:g} % quantile"
        tables[f"{shape.prompts} prompts, {name}, {shape.prompt_distance} distance, {quantile}"] = rows
    return tables
