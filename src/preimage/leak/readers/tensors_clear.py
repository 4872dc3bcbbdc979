"""Token ids and text beside states: in tensors, in what stands beside them, and in files of the same stem."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from preimage.errors import shown
from preimage.leak.holdings import Clear, Told
from preimage.leak.readers.plain_text import ID_NAMES, TEXT_NAMES, checked_ids, clear_in, parsed, read
from preimage.leak.readers.raw import is_file
from preimage.leak.readers.tensors_source import Source, last_part

_ROWS = (".json", ".jsonl")
_MOST_IDS = 1 << 22  # that are read of a file: in Python each takes many times its place in it
_MOST_TEXT = 1 << 22  # bytes of a text beside; more is not a prompt


def ids_of_rows(source: Source, told: Told, notes: list[str]) -> dict[str, list[tuple[int, ...]]]:
    """Of every tensor of whole numbers by a name that says ids: the ids of every prompt, padding included."""
    found, left = {}, _MOST_IDS
    for name, entry in source.entries.items():
        if not entry.whole or last_part(name) not in ID_NAMES or len(entry.shape) not in (1, 2):
            continue
        if 0 in entry.shape:
            continue
        width = entry.shape[-1]
        held = entry.shape[0] if len(entry.shape) == 2 else 1
        kept = min(left // width, held)
        if kept < held:
            notes.append(f"{shown(name)} has the ids of {held:,} prompts, of which {kept:,} were read.")
        if not kept:
            continue
        left -= kept * width
        read = source.rows(name, 0, kept) if len(entry.shape) == 2 else source.all(name)[None]
        rows = read.tolist()
        for row in rows:
            checked_ids(f"{shown(name)} in {shown(source.path.name)}", row, told)
        found[name] = [tuple(row) for row in rows]
    return found


def in_the_file(source: Source, told: Told, notes: list[str]) -> Iterator[Clear]:
    """Text and ids that stand beside the tensors: in a header, in a dict, as arrays of text."""
    plain = {
        last_part(name): parsed(value.encode(errors="replace"))
        if last_part(name) in ID_NAMES and isinstance(value, str)
        else value
        for name, value in source.about.items()
    }
    known = {name: value for name, value in plain.items() if name in (*ID_NAMES, *TEXT_NAMES)}
    yield from clear_in("beside the tensors", known, told, notes)


def beside(path: Path, told: Told, notes: list[str]) -> tuple[list[Clear], list[Path]]:
    """Text and ids in files of the same stem, and those files."""
    clear: list[Clear] = []
    paths: list[Path] = []
    for suffix in (*_ROWS, ".txt"):
        other = path.with_suffix(suffix)
        if other == path or not is_file(other) or other.is_symlink():
            continue
        where = f"the file {shown(other.name)}"
        found = _text(other, where) if suffix == ".txt" else _in_rows(other, where, told, notes)
        if found:
            clear.extend(found)
            paths.append(other)
    return clear, paths


def _in_rows(path: Path, where: str, told: Told, notes: list[str]) -> list[Clear]:
    holding = read(path, told)
    if holding is None:
        return []
    notes.extend(holding.notes)
    found = [one for piece in holding.pieces for one in piece.clear]
    return [Clear(f"{where}, {one.where}", one.token_ids, one.text) for one in found]


def _text(path: Path, where: str) -> list[Clear]:
    if path.stat().st_size > _MOST_TEXT:
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return [Clear(where, text=text)] if text.strip() else []
