"""``preimage reproduce``: the papers' tables and figures, measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from preimage.cli import DONE
from preimage.cli import arguments as arg
from preimage.cli.ending import print_written
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar
from preimage.errors import OptionError
from preimage.reproduce.options import PRESETS
from preimage.reproduce.registry import ITEMS, item_of
from preimage.storage import place_of

if TYPE_CHECKING:
    from preimage.reproduce import Reproduction


def reproduce(
    name: Annotated[str | None, typer.Argument(help="What to measure; see --list.")] = None,
    list_items: Annotated[bool, typer.Option("--list", help="Every table and figure by its name.")] = False,
    preset: Annotated[
        str, typer.Option(help="small: two cores and minutes; full: one GPU, as much as was published.")
    ] = "small",
    model: arg.Model = "smollm2",
    prompts: arg.Source = None,
    count: Annotated[int | None, typer.Option(help="Prompts, instead of the preset's.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a prompt, instead of the preset's.")] = None,
    layers: Annotated[str | None, typer.Option(help="all, 15, 1,8,final …; instead of the preset's.")] = None,
    seed: arg.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(parser=place_of, metavar="PLACE", help="Folder of NAME.json, NAME.md, NAME.parquet."),
    ] = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> int:
    """A table or figure of the papers: the published number, and the same measured here beside it."""
    if list_items or name is None:
        if name is not None:
            raise OptionError("A name and --list were given.", "Give one of them.")
        _list(json)
        return DONE
    given = {"count": count, "length": length, "layers": layers, "source": prompts}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    sizes = replace(item_of(name).sizes(preset), seed=seed, **changes)
    loaded, _ = arg.prepare(model, dtype=dtype, device=device)
    from preimage.reproduce import reproduce

    with progress_bar() as progress:
        found = reproduce(loaded, name, preset, sizes=sizes, out=out, progress=progress)
    if json:
        print_result("reproduce", found.to_dict())
    else:
        _show(found)
        print_written(out, f"{name}.md", f"{name}.json", f"{name}.parquet")
    return DONE


def _list(json: bool) -> None:
    if json:
        entries = [
            {"name": one.name, "paper": one.paper, "title": one.title}
            | {preset: one.sizes(preset).to_dict() for preset in PRESETS}
            for one in ITEMS.values()
        ]
        print_result("reproduce", {"items": entries})
        return
    rows = [[one.name, one.paper, one.title] for one in ITEMS.values()]
    print_table("preimage reproduce NAME", ["name", "paper", "what it shows"], rows, prose=["what it shows"])


def _show(found: Reproduction) -> None:
    columns = ["", "published", "measured", "verdict"]
    rows = [list(row.values()) for row in found.table]
    print_table(f"{found.title} ({found.paper})", columns, rows, prose=columns)
    for title, texts in (("What differs:", found.differs), ("To be known:", found.caveats)):
        if texts:
            print_lines("", title, *(f"- {text}" for text in texts))
    print_lines("", f"{found.seconds:.0f} s, preset {found.preset}.")
