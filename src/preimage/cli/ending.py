"""What the end of a command says of what it wrote: where, which files, and the one to open."""

from __future__ import annotations

from preimage.cli.terminal import print_lines, print_whole
from preimage.storage import Place, is_remote, names_in

_OWN = (".json", ".parquet", ".html", ".svg", ".pdf", ".md", ".safetensors")  # what people read of a run
_OPENED = (".html", ".pdf", ".svg", ".md", ".json")  # the first of these that there is


def print_written(out: Place | None, *written: str, first: str = "") -> None:
    """Name the files in a folder, and the one to open; nothing where nothing was kept.

    ``written``: their names, where the folder is not the command's own; ``first``: how the name of the one to
    open begins, where there are several of its kind.
    """
    if out is None:
        return
    names = list(written) or [name for name in names_in(out) if name.endswith(_OWN)]
    folders = (
        [] if written or is_remote(out) else [f"{one.name}/" for one in sorted(out.iterdir()) if one.is_dir()]
    )
    print_lines("", f"Written to {out}: {', '.join([*names, *folders])}.")
    for ending in _OPENED:
        some = [name for name in names if name.endswith(ending)]
        if some:
            print_whole(f"Open {out / next((name for name in some if name.startswith(first)), some[0])}")
            return
