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
    lens,
    models,
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
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command()(models.models)
app.command()(capture.capture)
app.command()(invert.invert)
app.command()(collisions.collisions)
app.command()(collisions.continuations)
app.command()(geometry.geometry)
app.command()(trajectory.trajectory)
app.add_typer(lens.app, name="lens")
app.add_typer(theory.app, name="theory")
app.add_typer(bench.app, name="bench")
