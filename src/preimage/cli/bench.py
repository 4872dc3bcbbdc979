"""``preimage bench``: speed, as ratios measured in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from preimage.cli.arguments import Device, Dtype, Json, Model
from preimage.cli.terminal import print_json, print_lines, progress_bar
from preimage.schema import SCHEMA

app = typer.Typer(help="Measure speed, as ratios within one run.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure speed, as ratios within one run."""


@app.command("capture")
def capture(
    model: Model = "smollm2",
    count: Annotated[int, typer.Option(help="Prompts a round.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens a prompt.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; the median ratio is reported.")] = 5,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one pass, on both sides.")] = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Capture of all layers against a plain transformers forward pass over the same prompts."""
    import preimage
    from preimage.bench import bench_capture

    loaded = preimage.load(model, dtype=dtype, device=device)
    with progress_bar() as progress:
        result = bench_capture(
            loaded,
            count=count,
            length=length,
            rounds=rounds,
            batch_tokens=batch_tokens,
            progress=progress,
        )
    if json:
        print_json({"schema": SCHEMA, "command": "bench capture", **result})
    else:
        print_lines(
            f"fraction of forward: {result['fraction_of_forward']:.3f}",
            f"plain forward {result['forward_seconds']:.3f} s, capture {result['capture_seconds']:.3f} s, "
            f"{result['tokens']} tokens at {result['layers']} layers",
        )
