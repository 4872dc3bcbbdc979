"""What the documents tell a reader to type: commands, lines of Python, cells of tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What was true of an earlier version stays in the changelog as it was.
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if path.name != "CHANGELOG.md"
)
_FENCE = re.compile(r"^\s*(```|~~~|:::)\s*(\{?)([\w-]*)")
_INLINE = re.compile(r"(?<!`)`(?!`)([^`\n]+)`(?!`)")
_SHELL = ("", "bash", "sh", "shell", "console", "text")
_PROSE = ("table", "include", "toctree", "glossary", "note", "warning", "tip", "picture")  # MyST's fences


@dataclass(frozen=True)
class Typed:
    """Something a reader may type, as it stands in a document."""

    page: Path
    line: int
    text: str
    whole: bool  # on a line of its own; else between backticks in running text or in a table
    cell: tuple[str, int] | None = None  # in a table: the head of its column, and the row's line

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def typed(page: Path, text: str | None = None) -> list[Typed]:
    """Lines of code and code between backticks, in the order of the page; blocks of Python are left out."""
    found: list[Typed] = []
    fence, head, row = None, [], ""
    lines = (text if text is not None else (ROOT / page).read_text(encoding="utf-8")).splitlines()
    for number, line in enumerate(lines, 1):
        mark = _FENCE.match(line)
        if mark and (fence is None or not mark[3]):
            fence = (
                None if fence is not None else ("" if mark[3] in _PROSE and mark[2] else f"code {mark[3]}")
            )
            continue
        if fence is not None and fence.removeprefix("code ") not in ("", *_SHELL):
            continue
        if (fence or "").startswith("code") or (not fence and line.startswith("    ")):
            found.append(Typed(page, number, line.strip().removeprefix("$ "), True))
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and not row:
            head = cells
        row = line if cells else ""
        found += _inline(page, number, list(zip(head, cells, strict=False)) if cells else [("", line)])
    return found


def _inline(page: Path, number: int, cells: list[tuple[str, str]]) -> Iterator[Typed]:
    for head, cell in cells:
        for code in _INLINE.findall(cell):
            yield Typed(page, number, code, False, (head, number) if head else None)


def blocks(page: Path, text: str | None = None) -> list[tuple[int, str]]:
    """Every block of Python, by the line it begins on."""
    source = text if text is not None else (ROOT / page).read_text(encoding="utf-8")
    return [
        (source.count("\n", 0, found.start()) + 2, found[1])
        for found in re.finditer(r"^```python\n(.*?)^```", source, re.MULTILINE | re.DOTALL)
    ]
