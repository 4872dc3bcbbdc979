"""Token ids and text beside states: in tensors, in a header, and in a file of the same stem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from preimage.errors import StatesError, shown
from preimage.leak.holdings import Clear, Told
from preimage.leak.readers.tensors_source import Named, Source
from preimage.storage.files import parse_json

ID_NAMES = ("input_ids", "prompt_token_ids", "token_ids", "tokens", "output_ids", "ids")
_TEXT_NAMES = ("prompt", "text", "prompt_text", "input", "input_text", "content", "instruction", "question")
_BESIDE = (".json", ".jsonl", ".txt")
_MOST_BYTES = 1 << 26  # of a file beside; more is not a prompt
_MOST_IDS = 1 << 24


def last_part(name: str) -> str:
    """The part of a dotted name that says what it is."""
    return name.replace("/", ".").rsplit(".", 1)[-1].lower()


def id_tensors(source: Source) -> dict[str, Named]:
    """Tensors of whole numbers by a name that says ids."""
    return {
        name: one
        for name, one in source.tensors.items()
        if one.whole and last_part(name) in ID_NAMES and len(one.shape) <= 2
    }


def ids_of_rows(path: Path, name: str, one: Named, told: Told) -> list[tuple[int, ...]]:
    """The ids in a tensor, of every prompt."""
    if not all(one.shape) or one.shape[0] * (one.shape[1] if len(one.shape) > 1 else 1) > _MOST_IDS:
        return []
    table: Tensor = one.all()
    rows = table.tolist() if table.ndim == 2 else [table.tolist()]
    highest = _MOST_IDS if told.sizes is None else told.sizes.vocab_size
    lowest, most = min(map(min, rows)), max(map(max, rows))
    if lowest < -200 or most >= highest:  # -100 and -1 are common for what is not to be learned
        raise StatesError(
            f"{shown(name)} in {path.name} has ids from {lowest} to {most}; the vocabulary ends at "
            f"{highest - 1}.",
            "Name the model whose tokens they are.",
        )
    return [tuple(row) for row in rows]


def of_header(about: Iterable[tuple[str, str]], told: Told) -> Iterator[Clear]:
    """Text and ids in the header of a safetensors file."""
    for name, value in about:
        where = f"the header, {shown(name)}"
        if last_part(name) in ID_NAMES:
            found = _ids_in(_parsed(value), told)
            if found:
                yield Clear(where, token_ids=found)
        elif last_part(name) in _TEXT_NAMES and value:
            yield Clear(where, text=value)


def beside(path: Path, told: Told) -> tuple[list[Clear], list[Path], list[str]]:
    """Text and ids in files of the same stem, those files, and notes."""
    clear: list[Clear] = []
    paths: list[Path] = []
    notes: list[str] = []
    for suffix in _BESIDE:
        other = path.with_suffix(suffix)
        if other == path or not other.is_file():
            continue
        if other.stat().st_size > _MOST_BYTES:
            notes.append(f"{shown(other.name)} lies beside, too large for a prompt; it was not read.")
            continue
        found = list(_in_file(other, told))
        if found:
            clear.extend(found)
            paths.append(other)
    return clear, paths, notes


def _in_file(path: Path, told: Told) -> Iterator[Clear]:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return
    where = f"the file {shown(path.name)}"
    if path.suffix == ".txt":
        if text.strip():
            yield Clear(where, text=text)
        return
    parsed = [_parsed(text)] if path.suffix == ".json" else [_parsed(line) for line in text.splitlines()]
    for document in parsed:
        for one in document if isinstance(document, list) else [document]:
            if isinstance(one, dict):
                yield from _in_document(where, one, told)


def _in_document(where: str, document: dict[str, Any], told: Told) -> Iterator[Clear]:
    for name, value in document.items():
        if name.lower() in _TEXT_NAMES and isinstance(value, str) and value:
            yield Clear(f"{where}, {shown(name)}", text=value)
        elif name.lower() in ID_NAMES:
            found = _ids_in(value, told)
            if found:
                yield Clear(f"{where}, {shown(name)}", token_ids=found)
        elif name.lower() in ("messages", "conversations") and isinstance(value, list):
            said = [one.get("content", one.get("value")) for one in value if isinstance(one, dict)]
            text = "\n".join(one for one in said if isinstance(one, str))
            if text:
                yield Clear(f"{where}, {shown(name)}", text=text)


def _ids_in(value: Any, told: Told) -> tuple[int, ...] | None:
    highest = _MOST_IDS if told.sizes is None else told.sizes.vocab_size
    flat = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    if not isinstance(flat, list) or not flat or not all(type(one) is int for one in flat):
        return None
    return tuple(flat) if all(0 <= one < highest for one in flat) else None


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None
