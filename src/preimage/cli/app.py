"""The commands, one module each."""

from __future__ import annotations

from typing import Annotated

import typer

from preimage import __version__
from preimage.cli import (
    bench,
    capture,
    collisions,
    demo,
    doctor,
    geometry,
    invert,
    leak,
    lens,
    models,
    report,
    reproduce,
    serve,
    theory,
    trajectory,
)

app = typer.Typer(
    name="preimage",
    help="Which prompt made this hidden state, and could any other have made it?",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"preimage {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Which prompt made this hidden state, and could any other have made it?"""


for command in (
    demo.demo, doctor.doctor, models.models, capture.capture, invert.invert, leak.leak,
    collisions.collisions, collisions.continuations, geometry.geometry, trajectory.trajectory,
    reproduce.reproduce, report.report, serve.serve,
):  # fmt: skip
    app.command()(command)
for name, group in {"lens": lens.app, "theory": theory.app, "bench": bench.app}.items():
    app.add_typer(group, name=name)
