"""Prompts from the ``datasets`` library: hub datasets and local folders, streamed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from preimage.errors import MissingExtraError, PromptError
from preimage.prompts.files import choose_column, reason
from preimage.prompts.tokens import Entry

PREFIX = "datasets:"
_COLUMN_HINT = "Name the column to read after the split: datasets:NAME:SPLIT:COLUMN."


class StreamName(NamedTuple):
    """The parts of ``datasets:NAME[:SPLIT[:COLUMN]]``; ``column`` None means the usual names."""

    name: str
    config: str | None
    split: str
    column: str | None


def parse_stream(source: str) -> StreamName:
    """Take a ``datasets:`` source apart.

    A colon may belong to a local folder's path: the longest beginning that exists as a path is the
    name. A hub name may carry its configuration: ``allenai/c4/en``.
    """
    rest = source.removeprefix(PREFIX)
    pieces = rest.split(":")
    for end in range(len(pieces), 0, -1):
        name = ":".join(pieces[:end])
        if len(pieces) - end <= 2 and name and _exists(name):
            return _stream_name(source, os.path.expanduser(name), None, pieces[end:])
    name, options = pieces[0], pieces[1:]
    if name.startswith(("/", ".", "~", "\\")):
        raise PromptError(
            f"There is no folder {name!r} to read prompts from.", "Check the path in the source."
        )
    owner_name, config = name, None
    if name.count("/") == 2:
        owner_name, _, config = name.rpartition("/")
    return _stream_name(source, owner_name, config, options)


def read_stream(source: str) -> Iterator[Entry]:
    """Yield the prompts of a ``datasets:`` source in its own order; empty rows are passed over.

    Cost: rows are streamed, so only what is asked for is read (and, for a hub name, downloaded).
    Raises MissingExtraError without the ``datasets`` package, PromptError for what it cannot give.
    """
    wanted = parse_stream(source)
    rows = _rows(wanted, source)
    column = wanted.column
    for number, row in enumerate(rows):
        column = column or choose_column(row, source=source, hint=_COLUMN_HINT)
        if column not in row:
            raise PromptError(f"{source} has no column {column!r}; it has {', '.join(row)}.", _COLUMN_HINT)
        if row[column] not in (None, "", []):
            yield Entry(f"{source}, row {number}", row[column])


def _rows(wanted: StreamName, source: str) -> Iterator[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtraError(
            f"{source} needs the datasets package, which is not installed.",
            'Install it: pip install "preimage[data]"',
        ) from None
    try:
        if not os.path.exists(wanted.name):
            _ask_hub(wanted.name)
        yield from load_dataset(wanted.name, wanted.config, split=wanted.split, streaming=True)
    except Exception as error:  # whatever a loader raises: network, hub, split, broken file
        raise PromptError(
            f"{source} cannot be read: {reason(error)}.",
            "A source is datasets:NAME[:SPLIT[:COLUMN]], NAME a local folder or a hub dataset"
            " (OWNER/NAME or OWNER/NAME/CONFIG).",
        ) from None


def _ask_hub(name: str) -> None:
    # load_dataset tries for half a minute before it gives up on a network that is not there; this
    # one request fails at once, as it does for a name the hub does not know.
    from huggingface_hub import HfApi

    HfApi().dataset_info(name, timeout=10)


def _stream_name(source: str, name: str, config: str | None, options: list[str]) -> StreamName:
    if not name or len(options) > 2:
        raise PromptError(
            f"{source!r} is no dataset source.",
            "Write datasets:NAME, datasets:NAME:SPLIT or datasets:NAME:SPLIT:COLUMN.",
        )
    split, column = (*options, "", "")[:2]
    return StreamName(name, config, split or "train", column or None)


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))
