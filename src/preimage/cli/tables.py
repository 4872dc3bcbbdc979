"""How a table fits a terminal: whole, as tables of fewer columns, or row by row; a number is never broken.

A column is either kept whole (numbers, statuses: no cell is ever folded) or prose (texts of prompts,
statements, paths: folded between words). Where the whole columns and a readable width of the prose do not fit
beside one another, a table of numbers is shown as several, each with the first column in front, and one with
prose as a list of its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

LONG = 32  # characters beyond which a cell is prose, whatever its column was said to hold
_READABLE = 20  # characters a line of prose should have
_WORD = 24  # of a longer word in prose (a path, a hash) lines are made
_BETWEEN = 3  # characters from one column to the next: a line and a space on either side of it


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], prose: Collection[str], width: int
) -> Iterator[Table]:
    """The tables that show these rows in lines of ``width`` characters, one after another."""
    every = range(len(columns))
    cells = [[row[at] for row in rows] for at in every]
    folded = [columns[at] in prose or any(cell_len(cell) > LONG for cell in cells[at]) for at in every]
    least = [
        max(_longest_word([columns[at]]), _readable(cells[at]) if folded[at] else _widest(cells[at]))
        for at in every
    ]
    if _across(least) <= width:
        yield _table(columns, rows, every, _widened(columns, cells, least, width))
    elif any(folded):
        yield _listed(columns, rows, width)
    else:
        for some in _bands(least, width):
            held = [min(least[at], max(1, width - 2)) for at in some]
            yield _table(columns, rows, some, held)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int], widths: Sequence[int]
) -> Table:
    table = Table(show_edge=False)
    for at, width in zip(chosen, widths, strict=True):
        table.add_column(Text(columns[at]), width=width, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[at]) for at in chosen))
    return table


def _listed(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A row as lines of a name and a value each; empty ones are left out."""
    named = max(map(cell_len, columns))
    table = Table(show_edge=False, show_header=False)
    table.add_column(width=named, overflow="fold")
    table.add_column(width=max(1, width - named - _BETWEEN - 2), overflow="fold")
    for row in rows:
        shown = [(name, cell) for name, cell in zip(columns, row, strict=True) if cell]
        for number, (name, cell) in enumerate(shown, 1):
            table.add_row(Text(name), Text(cell), end_section=number == len(shown))
    return table


def _bands(least: Sequence[int], width: int) -> Iterator[list[int]]:
    """Columns in groups that fit, the first in each: it says whose numbers they are."""
    band = [0]
    for at in range(1, len(least)):
        if len(band) > 1 and _across([least[one] for one in (*band, at)]) > width:
            yield band
            band = [0]
        band.append(at)
    yield band


def _widened(
    columns: Sequence[str], cells: Sequence[Sequence[str]], least: Sequence[int], width: int
) -> list[int]:
    """What is left of a line given to the columns that want it: a header on one line, then prose."""
    widths = list(least)
    left = width - _across(least)
    wanted = [max(cell_len(columns[at]), _widest(cells[at])) for at in range(len(columns))]
    waiting = sorted(range(len(columns)), key=lambda at: wanted[at] - least[at])
    for number, at in enumerate(waiting):  # those that want little first; the others share what is left of it
        more = max(0, min(wanted[at] - widths[at], left // (len(waiting) - number)))
        widths[at] += more
        left -= more
    return widths


def _across(widths: Sequence[int]) -> int:
    """Characters of a line with columns of these widths."""
    return sum(widths) + _BETWEEN * len(widths) - 1


def _widest(cells: Sequence[str]) -> int:
    return max(map(cell_len, cells), default=1)


def _readable(cells: Sequence[str]) -> int:
    """The narrowest column in which prose can be read, and no number in it is broken."""
    return max(min(_widest(cells), _READABLE), min(_longest_word(cells), _WORD))


def _longest_word(cells: Sequence[str]) -> int:
    return max((cell_len(word) for cell in cells for word in cell.split()), default=1)
