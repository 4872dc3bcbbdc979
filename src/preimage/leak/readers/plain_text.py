"""Prompts and token ids that stand in json as they are: request logs, training sets, files beside states.

A row is recognised by the names of its fields, as chat and completion requests and the common training sets
have them. Some rows are kept; all of them are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from preimage.errors import StatesError, shown
from preimage.leak.holdings import Clear, Holding, Piece, Told
from preimage.leak.readers.raw import is_file
from preimage.storage.files import parse_json

KIND = "plain text"
ID_NAMES = ("input_ids", "prompt_token_ids", "prompt_ids", "token_ids", "tokens", "output_ids", "ids")
TEXT_NAMES = (
    "prompt", "prompts", "text", "texts", "prompt_text", "input", "inputs", "input_text", "question",
    "instruction", "completion", "response", "output", "answer",
)  # fmt: skip
CHAT_NAMES = ("messages", "conversations", "conversation")
_HIGHEST = 1 << 24  # more than any vocabulary has
_LINES, _SUFFIXES = (".jsonl", ".ndjson"), (".jsonl", ".ndjson", ".json")
_MOST_ROWS = 1000  # that are kept of a file
_MOST_KEPT = 1 << 26  # bytes of rows that are kept
_LONGEST_LINE = 1 << 24  # bytes; json takes many times its size in memory
_LARGEST = 1 << 26  # bytes of json that is read whole
_PARTS, _MOST_PARTS = (b"[", b"{", b'"'), 1 << 22  # of json: each takes far more memory than its byte
_LEVELS = 3  # of objects in one another: a request stands inside what a log says of it
_LEAST_ID = -200  # -1 and -100 mark what is padding, or not to be learned
_FIELD = re.compile(rb'"(' + "|".join((*ID_NAMES, *TEXT_NAMES, *CHAT_NAMES)).encode() + rb')"\s*:')


def read(path: Path, told: Told) -> Holding | None:
    """The prompts and ids in a file of json; None where there are none, or where it is another file."""
    if path.suffix.lower() not in _SUFFIXES or not is_file(path):
        return None
    notes: list[str] = []
    if path.suffix.lower() == ".json" and path.stat().st_size > _LARGEST:
        return _too_large(path)
    pieces: list[Piece] = []
    kept = rows = 0
    for size, document in _rows(path):
        if len(pieces) == _MOST_ROWS or kept > _MOST_KEPT:
            rows += size > 0
            continue
        clear = tuple(clear_in("", document, told, notes)) if isinstance(document, dict) else ()
        if clear:
            rows, kept = rows + 1, kept + size
            pieces.append(_piece(path, len(pieces), clear))
    if not pieces:
        return None
    if rows > len(pieces):
        notes.append(f"{rows - len(pieces):,} more rows were counted, not read.")
    about = (
        f"{rows:,} rows of prompts or token ids in json, in the clear; known by the names of their fields."
    )
    return Holding((path,), KIND, about, tuple(pieces), tuple(dict.fromkeys(notes)))


def clear_in(where: str, document: Mapping[str, Any], told: Told, notes: list[str]) -> Iterator[Clear]:
    """Text and token ids in the fields of an object, and of objects inside it; ``where`` it was found."""
    yield from _inside(where, document, told, notes, _LEVELS)


def parsed(text: bytes) -> Any:
    """What json says; None where it is none, or has so many parts that it was made to fill the memory."""
    if sum(map(text.count, _PARTS)) > _MOST_PARTS:
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None


def checked_ids(where: str, ids: list[int], told: Told) -> tuple[int, ...]:
    """Token ids without those that mark padding; refused where the vocabulary has not got them."""
    highest = _HIGHEST if told.sizes is None else told.sizes.vocab_size
    lowest, most = min(ids, default=0), max(ids, default=0)
    if lowest < _LEAST_ID or most >= highest:
        raise StatesError(
            f"{where} has ids from {shown(str(lowest))} to {shown(str(most))}; the vocabulary ends at "
            f"{highest - 1}.",
            "Name the model whose tokens they are.",
        )
    return tuple(one for one in ids if one >= 0)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file and how many bytes each has; one that is no json, or too long, is None."""
    if path.suffix.lower() not in _LINES:
        raw = path.read_bytes()
        found = parsed(raw)
        if found is not None:
            rows = found if isinstance(found, list) else [found]
            each = len(raw) // max(1, len(rows))
            yield from ((each, row) for row in rows)
            return
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            whole = line.endswith(b"\n") or len(line) < _LONGEST_LINE
            yield len(line.strip()), parsed(line) if whole else None
            while not whole and (line := file.readline(_LONGEST_LINE)):
                whole = line.endswith(b"\n")


def _piece(path: Path, row: int, clear: tuple[Clear, ...]) -> Piece:
    ids = next((one.token_ids for one in clear if one.token_ids is not None), None)
    return Piece(f"{path.name}, row {row}", None if ids is None else len(ids), 0, clear=clear)


def _too_large(path: Path) -> Holding | None:
    """A file that is not read whole, by the fields in its beginning."""
    with path.open("rb") as file:
        names = sorted({match.decode() for match in _FIELD.findall(file.read(1 << 20))})
    if not names:
        return None
    about = f"Json with the fields {', '.join(names)} in its beginning: prompts or token ids in the clear."
    note = f"It has {path.stat().st_size >> 20} MB and was not read whole: save a row a line, as .jsonl."
    return Holding((path,), KIND, about, (), (note,))


def _inside(
    where: str, document: Mapping[str, Any], told: Told, notes: list[str], levels: int
) -> Iterator[Clear]:
    for name, value in document.items():
        place = f"{where}, {shown(name)}" if where else shown(name)
        kind = name.lower()
        if kind in ID_NAMES or kind in TEXT_NAMES:
            yield from _said(place, value, kind in TEXT_NAMES, told, notes)
        elif kind in CHAT_NAMES and isinstance(value, list):
            text = "\n".join(_spoken(value))
            if text:
                yield Clear(place, text=text)
        elif isinstance(value, dict) and levels > 1:
            yield from _inside(place, value, told, notes, levels - 1)


def _said(place: str, value: Any, text: bool, told: Told, notes: list[str]) -> Iterator[Clear]:
    """A field: text, several texts, a chat, token ids, or several rows of them."""
    if isinstance(value, str):
        if text and value:
            yield Clear(place, text=value)
        return
    if not isinstance(value, list) or not value:
        return
    if _all_ids(value):
        ids = _ids(value, told, notes)
        if ids:
            yield Clear(place, token_ids=ids)
    elif all(isinstance(one, list) and one and _all_ids(one) for one in value):
        for one in value:
            yield from _said(place, one, text, told, notes)
    elif text and all(isinstance(one, str) for one in value):
        yield from (Clear(place, text=one) for one in value if one)
    elif text and (said := "\n".join(_spoken(value))):
        yield Clear(place, text=said)


def _all_ids(value: list[Any]) -> bool:
    return all(type(one) is int for one in value)


def _ids(value: list[int], told: Told, notes: list[str]) -> tuple[int, ...]:
    """The ids of a field; where the vocabulary has not got them a note is all there is."""
    try:
        return checked_ids("A row", value, told)
    except StatesError:
        notes.append(
            "Some rows have ids that the vocabulary has not got: of another model. They were not taken."
        )
        return ()


def _spoken(messages: list[Any]) -> Iterator[str]:
    """What the messages of a chat say; each is text, or parts of which some are."""
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content", message.get("value"))
        for part in content if isinstance(content, list) else [content]:
            said = part.get("text") if isinstance(part, dict) else part
            if isinstance(said, str) and said:
                yield said
