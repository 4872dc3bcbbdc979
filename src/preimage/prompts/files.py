"""Prompts from files: one a line (.txt, .jsonl) or a row (.parquet), read as far as needed."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from preimage.errors import PromptError, clip, first_line
from preimage.prompts.tokens import Entry, Prompt

# In this order: text is right under any tokenizer, ids only under the one that made them.
COLUMNS = ("text", "token_ids", "ids", "input_ids")
BYTE_ORDER_MARK = "\ufeff"
# A parquet file of prompts does not shrink so much; one that does was made to fill the memory.
_GROWTH, _SMALL = 100, 1 << 26  # fold, and bytes that are fine in any case
_LISTED = 100_000  # columns, or pieces of a column; pyarrow makes room for half a kilobyte each
SOURCES = (
    "'default', 'default:prose', 'default:code', 'random', 'same-next:arithmetic', 'same-next:translation',"
    " datasets:NAME, or a .txt, .jsonl or .parquet file"
)


def read_file(path: Path, *, whole: bool) -> Iterator[Entry]:
    """Yield the prompts of a file in file order; empty lines and rows are passed over.

    ``whole``: a .txt file is one document instead of one prompt a line.
    Cost: one line (.txt, .jsonl) or one batch of 1024 rows (.parquet) in memory at a time; a whole
    .txt file at once. Raises PromptError that names the file, and the line or row if there is one.
    """
    path = Path(os.path.expanduser(path))  # Path.expanduser raises where there is no such home
    suffix = path.suffix.lower()
    _check_is_file(path)
    if suffix == ".txt":
        return _read_document(path) if whole else (Entry(name, line) for name, line in _lines(path))
    if suffix == ".jsonl":
        return _read_jsonl(path)
    if suffix == ".parquet":
        return _read_parquet(path)
    raise PromptError(
        f"{path} has the unknown extension {suffix!r}; known: .txt, .jsonl, .parquet.",
        "Convert it, or pass the prompts as a list.",
    )


def choose_column(names: Iterable[str], *, source: str, hint: str) -> str:
    """The column that holds the prompts: the first of COLUMNS among ``names``."""
    there = list(names)
    for column in COLUMNS:
        if column in there:
            return column
    raise PromptError(
        f"{source} has no column {' or '.join(COLUMNS)}; it has {', '.join(there) or 'none'}.", hint
    )


def _check_is_file(path: Path) -> None:
    try:
        if path.is_file():
            return
        kind = "is a folder" if path.is_dir() else "is no ordinary file"
        problem = kind if path.exists() else "does not exist"
    except (OSError, ValueError):  # a name too long, or with a NUL in it: it was text, not a path
        problem = "is not a file name"
    raise PromptError(
        f"The source of prompts {clip(str(path))!r} {problem}.",
        f"Sources: {SOURCES}. Text that is itself a prompt goes inside a list: ['text'].",
    )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    # Read as bytes and split at newlines only: text mode would lose count of the line a bad byte is
    # on, and str.splitlines would break prompts at U+2028 and its like.
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                name = f"{path}, line {number}"
                line = _decode(raw, name).removesuffix("\n").removesuffix("\r")
                line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if line.strip():
                    yield name, line
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_document(path: Path) -> Iterator[Entry]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    text = _decode(raw, str(path)).removeprefix(BYTE_ORDER_MARK)
    yield Entry(str(path), text.replace("\r\n", "\n"))


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}.",
            "Save the file as UTF-8.",
        ) from None


def _read_jsonl(path: Path) -> Iterator[Entry]:
    for name, line in _lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = getattr(error, "msg", "too large or too deep")
            raise PromptError(f"{name} is not JSON: {problem}.", _JSONL_HINT) from None
        yield Entry(name, _json_prompt(value, name))


_JSONL_HINT = 'One a line: {"text": "…"}, {"token_ids": [1, 2]}, a JSON string or a list of ints.'


def _json_prompt(value: object, name: str) -> Prompt:
    if isinstance(value, Mapping):
        known = [column for column in COLUMNS if column in value]
        if not known:
            raise PromptError(f"{name} has none of the keys {', '.join(COLUMNS)}.", _JSONL_HINT)
        value = value[known[0]]
    if isinstance(value, str | list):
        return value
    raise PromptError(f"{name} holds {reprlib.repr(value)}, which is no prompt.", _JSONL_HINT)


def _read_parquet(path: Path) -> Iterator[Entry]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Lists of the footer have room made for before they are read, however long they say they are.
        opened = partial(pq.ParquetFile, path, thrift_container_size_limit=_LISTED)
        with opened() as file:
            names = file.schema_arrow.names
            column = choose_column(names, source=str(path), hint="Rename the one to read.")
            _require_moderate(path, file.metadata)
            text = file.schema_arrow.field(column).type in (pa.string(), pa.large_string())
        # One text may stand in a file once and be there in a thousand rows: it is once in memory, too.
        with opened(read_dictionary=[column] if text else None) as file:
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in (scalar.as_py() for scalar in batch.column(0)):
                    if value not in (None, "", []):
                        yield Entry(f"{path}, row {row}", value)
                    row += 1
    except OSError as error:
        raise _unreadable(path, error) from None
    except PromptError:
        raise
    except Exception as error:  # whatever a stranger's file makes pyarrow stumble over
        raise PromptError(f"{path} is no readable parquet file: {reason(error)}.", "Write it anew.") from None


def _require_moderate(path: Path, metadata: Any) -> None:
    """Refuse a file that says of itself that it would fill the memory.

    What it says of single columns is not asked for: of some files pyarrow ends the process over that.
    """
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if size > max(_SMALL, _GROWTH * path.stat().st_size):
        raise PromptError(
            f"{path} would grow more than a hundredfold, to {size >> 20} MiB.", "Write it as jsonl."
        )


def reason(error: BaseException) -> str:
    """The first line of an error's text, without the final stop."""
    return first_line(error).rstrip(".")


def _unreadable(path: Path, error: OSError) -> PromptError:
    problem = error.strerror or reason(error)
    return PromptError(f"{path} cannot be read: {problem}.", "Check the file and its permissions.")
