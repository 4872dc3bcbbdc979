"""Run folders as whoever only reads them sees them: nothing is locked, made or continued."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from preimage.errors import RunFolderError, first_line
from preimage.storage.files import SCHEMA, read_json, sha256_document
from preimage.storage.ledger import look_at
from preimage.storage.places import CHECK, Place, everything_in, exists, is_remote, read_bytes
from preimage.storage.run import RECORD, RUN, SUM

_MOST_RECORDS = 1000  # beginnings of one run that are read


@dataclass(frozen=True)
class KeptRun:
    """What a run folder holds: its plan, what came of it if it is done, else the pieces that are finished."""

    plan: dict[str, Any]
    done: bool
    results: Any
    items: dict[str, Any]
    records: tuple[dict[str, Any], ...]


def read_run(folder: Place) -> KeptRun:
    """A run folder, its checksums compared; what is damaged or of another version is refused."""
    path = folder / RUN
    plan = read_json(path)
    if plan.get("schema") != SCHEMA:
        raise RunFolderError(
            f"{path} has the schema {json.dumps(plan.get('schema'))[:40]}, not {SCHEMA}.",
            "Read it with the version of preimage that wrote it.",
        )
    digest = plan.pop(SUM, None)
    if digest != sha256_document(plan):
        raise RunFolderError(f"{path} fails its checksum.", "Copy it again, or run the command again.")
    done = plan.pop("state", None) == "done"
    results = plan.pop("results", None)
    items = {} if done else look_at(folder)
    return KeptRun(plan, done, results, items, read_records(folder))


def read_records(folder: Place) -> tuple[dict[str, Any], ...]:
    """Who began or continued the work in a folder, the first first; lines that are none are left out."""
    try:
        if is_remote(folder):
            lines = list(everything_in(folder / "record").values()) if exists(folder / "record") else []
        else:
            path = folder / RECORD
            lines = read_bytes(path).splitlines() if exists(path) else []
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise RunFolderError(f"{folder} cannot be read: {reason}.", CHECK) from error
    records = []
    for line in lines[:_MOST_RECORDS]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return tuple(sorted(records, key=lambda one: str(one.get("date"))))
