"""The commands, one module each."""

from __future__ import annotations

import typer

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
    reproduce,
    serve,
    theory,
    trajectory,
)

app = typer.Typer(
    name="preimage",
    help="Which prompt made this hidden state, and could any other have made it?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    demo.demo, doctor.doctor, models.models, capture.capture, invert.invert, leak.leak,
    collisions.collisions, collisions.continuations, geometry.geometry, trajectory.trajectory,
    reproduce.reproduce, serve.serve,
):  # fmt: skip
    app.command()(command)
for name, group in {"lens": lens.app, "theory": theory.app, "bench": bench.app}.items():
    app.add_typer(group, name=name)
