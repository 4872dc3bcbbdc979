"""Every page of results that has a raw file behind its tables, written again.

    python docs/results/build.py            # tables and figures; `git diff` then shows what had been typed
    python docs/results/build.py --check    # writes nothing, and fails where something would change

A page's script prints tables. Each takes the place of the page's own with the same head, in their order, so
that a page is words of people around tables of nobody.
"""

import contextlib
import importlib
import io
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {"geometry.md": "geometry_page", "observations.md": "observations_page", "leak.md": "leak_page"}


def tables(text: str) -> list[str]:
    """The markdown tables of a text, in order."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(lines) for lines in found if lines]


def rebuilt(page: str, made: list[str]) -> str:
    """A page with every table that was made in the place of its own of the same head."""
    waiting: dict[str, list[str]] = defaultdict(list)
    for one in made:
        waiting[head(one)].append(one)
    for old in tables(page):
        if waiting[head(old)]:
            page = page.replace(old, waiting[head(old)].pop(0), 1)
    left = [name for name, some in waiting.items() if some]
    if left:
        raise SystemExit(f"No place for the table {left[0]}")
    return page


def head(one: str) -> str:
    """What a table is known by: its first line without padding."""
    return "|".join(cell.strip() for cell in one.partition("\n")[0].split("|"))


def printed(script: str, figures: bool) -> list[str]:
    """The tables a script prints; its figures are written where they belong, or not at all."""
    said = io.StringIO()
    module = importlib.import_module(script)
    if not figures:
        vars(module)["save_figures"] = lambda *_: None
    with contextlib.redirect_stdout(said):
        module.main()
    return tables(said.getvalue())


def main() -> None:
    """All pages."""
    check = "--check" in sys.argv
    sys.path.insert(0, str(HERE))
    changed = []
    pages = {
        name: rebuilt((HERE / name).read_text("utf-8"), printed(script, not check))
        for name, script in SCRIPTS.items()
    }
    if (HERE / "raw" / "papers").is_dir():
        pages["papers.md"] = importlib.import_module("papers").text()
    for name, page in pages.items():
        path = HERE / name
        if not path.is_file() or path.read_text("utf-8") != page:
            changed.append(name)
            if not check:
                path.write_text(page, "utf-8")
    print("Changed:", ", ".join(changed) or "nothing")  # noqa: T201  # a script
    sys.exit(bool(check and changed))


if __name__ == "__main__":
    main()
