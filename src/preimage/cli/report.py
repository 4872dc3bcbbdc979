"""``preimage report``: one page of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from preimage.cli import DONE
from preimage.cli import arguments as arg
from preimage.cli.terminal import print_either
from preimage.errors import OptionError
from preimage.storage import Place, place_of
from preimage.storage.places import kind_of

_NAME = "report.html"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN…",
            help="Run folders, bundles, lenses, saved results or files of --json; several are compared.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            parser=place_of,
            metavar="FILE.html",
            help=f"The page; default: {_NAME} in the one run's folder, ./{_NAME} for several.",
        ),
    ] = None,
    json: arg.Json = False,
) -> int:
    """One html page of any run: a summary, texts, figures, numbers; it needs no network."""
    from preimage.report.page import save_page
    from preimage.report.registry import KINDS, run_page
    from preimage.report.runs import open_runs

    places = [place_of(run) for run in runs]
    target = _target(places) if out is None else out
    if not target.name.endswith((".html", ".htm")):
        raise OptionError(f"--out is {str(target)[:200]!r}, which is no page.", "Give FILE.html.")
    opened = open_runs(places)
    written = save_page(target, run_page(opened))
    size = written.stat().st_size
    document = {
        "report": str(written),
        "bytes": size,
        "runs": [
            {"name": one.name, "kind": one.kind, "by": one.about, "unfinished": one.unfinished or None,
             "summary": KINDS[one.kind].summary(one).headline}
            for one in opened
        ],
    }  # fmt: skip
    lines = [
        f"{one.name}: {KINDS[one.kind].summary(one).headline} {one.unfinished}".rstrip() for one in opened
    ]
    print_either(
        json, "report", document, *lines, f"Written: {written} ({size / 1e6:.1f} MB). Open it in a browser."
    )
    return DONE


def _target(places: list[Place]) -> Place:
    """Beside what was read, where that is one folder; else here."""
    if len(places) == 1 and kind_of(places[0]) == "directory":
        return places[0] / _NAME
    return Path(_NAME)
