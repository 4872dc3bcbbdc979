"""``preimage geometry``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli.arguments import (
    Bos,
    Count,
    Device,
    Dtype,
    Json,
    Length,
    Model,
    PromptChoice,
    Seed,
    Source,
    Texts,
    many_prompts,
)  # fmt: skip
from preimage.cli.terminal import print_json, print_table, progress_bar
from preimage.errors import OptionError
from preimage.manifest import read_manifest
from preimage.schema import SCHEMA

if TYPE_CHECKING:
    from preimage.results import Geometry

_BATCH_TOKENS = 4096


def geometry(
    bundle: Annotated[Path | None, typer.Argument(help="A state bundle with its token ids.")] = None,
    model: Model = "smollm2",
    text: Texts = None,
    prompts: Source = None,
    count: Count = None,
    length: Length = None,
    seed: Seed = 0,
    bos: Bos = None,
    layers: Annotated[str, typer.Option(help="all, 15, 0-4, 1,8,final …")] = "all",
    bits: Annotated[str, typer.Option(help="Quantise the states to so many bits, 8,4 …; or none.")] = "8,4",
    granularity: Annotated[str, typer.Option(help="A step for each layer, channel or vector.")] = "layer",
    value_range: Annotated[
        str, typer.Option("--range", help="Of the codes: absmax, minmax or percentile.")
    ] = "absmax",
    percentile: Annotated[float, typer.Option(help="Of |h|, for --range percentile.")] = 99.9,
    quantile: Annotated[float, typer.Option(help="Of the prompts' own margins and ratios.")] = 0.01,
    out: Annotated[Path | None, typer.Option(help="Run folder; rerunning continues it.")] = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Margins, co-Lipschitz constants and near-collisions, layer by layer, in full and in few bits."""
    if bundle is not None:
        if text or prompts:
            raise OptionError("A bundle and prompts were given.", "Give one of them.")
        read_manifest(bundle)  # what is no bundle is refused before torch is imported
    import preimage
    from preimage.geometry import GeometryOptions, Quantiser
    from preimage.layers import parse_layers
    from preimage.models import read_preview
    from preimage.models.loading import parse_device

    quantiser = Quantiser(granularity=granularity, range=value_range, percentile=percentile)
    options = GeometryOptions(bits=parse_bits(bits), quantile=quantile, quantiser=quantiser)
    on = parse_device(device)
    if bundle is not None:
        states = preimage.open_states(bundle)
    else:
        source, count = many_prompts(text, prompts, count)
        choice = PromptChoice(text, source, count, length, seed, bos)
        known = read_preview(model)
        if known is not None:
            parse_layers(layers, known.n_layers)
            choice.token_ids(known)
        loaded = preimage.load(model, dtype=dtype, device=device)
        with progress_bar() as progress:
            states = preimage.capture(
                loaded, list(dict.fromkeys(choice.token_ids(loaded))), layers, positions="last",
                batch_tokens=_BATCH_TOKENS, progress=progress,
            )  # fmt: skip
    with progress_bar() as progress:
        found = preimage.measure_geometry(states, options=options, device=on, out=out, progress=progress)
    if out is not None:
        _save_figures(found, out)
    if json:
        print_json({"schema": SCHEMA, "command": "geometry", "model": states.model, **found.to_dict()})
    else:
        _show(found)


def _save_figures(found: Geometry, out: Path) -> None:
    from preimage.report import layer_figure, near_collision_figure, quantised_figure
    from preimage.results import write_text

    figures = {"layers": layer_figure, "near-collisions": near_collision_figure}
    if found.quantised:
        figures["quantised"] = quantised_figure
    for name, draw in figures.items():
        page = draw(found).to_html(include_plotlyjs=True, div_id=name)
        write_text(out / f"{name}.html", page)


def parse_bits(given: str) -> tuple[int | None, ...]:
    """Full precision, and the numbers of bits in a list such as 8,4; or none of them."""
    if given == "none":
        return (None,)
    try:
        return (None, *(int(part) for part in given.split(",")))
    except ValueError:
        raise OptionError(f"--bits is {given!r}.", "Give numbers such as 8,4, or none.") from None


def _show(found: Geometry) -> None:
    q = f"{100 * found.options['quantile']:g} %"
    columns = ["layer", "mean norm", "margin", f"margin {q}", "/ norm", "co-Lipschitz", f"{q}", "/ norm",
               "x length", "distortion", "dimension", "collisions"]  # fmt: skip
    sets = {"full precision": found.layers} | {
        f"{b} bits": some.layers for b, some in found.quantised.items()
    }
    for name, layers in sets.items():
        rows = []
        for layer, one in layers.items():
            numbers = (
                one.mean_norm, one.margin, one.margin_quantile, one.normalised_margin_quantile,
                one.colipschitz, one.colipschitz_quantile, one.normalised_colipschitz_quantile,
                one.length_colipschitz_quantile, one.distortion, one.intrinsic_dimension,
            )  # fmt: skip
            shown = ["-" if number is None else f"{number:.3g}" for number in numbers]
            rows.append([str(layer), *shown, str(one.collisions)])
        print_table(f"{found.prompts} prompts, {name}, {found.prompt_distance} distance", columns, rows)
