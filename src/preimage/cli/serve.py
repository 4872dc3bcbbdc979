"""``preimage serve``."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli import DONE
from preimage.cli import arguments as arg
from preimage.cli.terminal import print_either

if TYPE_CHECKING:
    from preimage.web import Served


def serve(
    model: arg.Model = "smollm2",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Another address than this machine's own needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="PREIMAGE_TOKEN", help="What every request has to bring then.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="A folder of run folders to browse and compare.")] = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """A local page: type a prompt or drop a file of states, and watch the inverter read it.

    It listens on this machine alone. Ctrl-C ends it, with whatever it was doing.
    """
    from preimage.preparation import Preparation
    from preimage.web.options import ServeOptions

    options = ServeOptions(host, port, token, runs)
    prepared = Preparation(model, dtype=dtype, device=device)

    def listening(served: Served) -> None:
        known = {"url": served.url, "model": prepared.name, "token": token is not None}
        asks = "" if token is None else " Open it once with ?token=… behind it."
        print_either(json, "serve", known, f"{served.url} shows {prepared.name}.{asks} Ctrl-C ends it.")
        if open_:
            webbrowser.open(served.url if token is None else f"{served.url}?token={token}")

    from preimage.web import serve as serve_page

    if not serve_page(prepared, options, listening):
        sys.stdout.flush()
        os._exit(DONE)  # a thread still loads a model, and nothing is left that it could leave half done
    return DONE
