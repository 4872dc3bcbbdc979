"""Run folders: work that can be stopped at any moment and continued.

``run.json`` holds the plan and, at the end, the results; ``items.jsonl`` has a line for every finished item.
The same plan continues a folder; another plan is refused, naming what differs and both values. One process
works in a folder at a time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from preimage.errors import RunFolderError
from preimage.plans import differences
from preimage.results.files import plain, read_json, write_json, write_table
from preimage.results.locking import hold
from preimage.schema import SCHEMA

_RUN, _ITEMS = "run.json", "items.jsonl"


class RunFolder:
    """One run: begun or continued on construction."""

    def __init__(self, path: str | Path, plan: dict[str, Any]) -> None:
        self.path = Path(path)
        self.plan: dict[str, Any] = plain({"schema": SCHEMA, **plan})
        self.items: dict[str, Any] = {}
        self.results: dict[str, Any] | None = None  # of a run that is done
        foreign = RunFolderError(f"{self.path} exists and is no run folder.", "Give a new or empty folder.")
        if self.path.exists() and not self.path.is_dir():
            raise foreign
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"{self.path} cannot be written: {error.strerror}.", "Give another place."
            ) from error
        hold(self.path, self)
        if (self.path / _RUN).exists():
            self._continue()
        elif any(self.path.iterdir()):
            raise foreign
        else:
            write_json(self.path / _RUN, {**self.plan, "state": "running"})

    def add(self, key: str, item: dict[str, Any]) -> None:
        """Record one finished item; it is on the disk when this returns."""
        line = json.dumps(plain({"key": key, "item": item}), allow_nan=False)
        try:
            with (self.path / _ITEMS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunFolderError(
                f"{self.path / _ITEMS} cannot be written: {error.strerror}.",
                "Make room and rerun the same command: it continues.",
            ) from error
        self.items[key] = plain(item)

    def finish(self, document: dict[str, Any]) -> None:
        """Write the results beside the plan."""
        write_json(self.path / _RUN, {**self.plan, "state": "done", **document})

    def write_table(self, name: str, rows: list[dict[str, Any]]) -> Path:
        """Write a table beside the results."""
        return write_table(self.path / f"{name}.parquet", rows)

    def _continue(self) -> None:
        saved = read_json(self.path / _RUN)
        changed = differences(saved, self.plan)
        if changed:
            raise RunFolderError(
                f"{self.path} was begun with {changed}.", "Rerun the first command, or give another folder."
            )
        if saved.get("state") == "done":
            self.results = saved.get("results")
        items = self.path / _ITEMS
        if items.exists():
            self._read_items(items)

    def _read_items(self, path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):  # the line being written when the run was stopped
            temporary = path.with_name(path.name + ".partial")
            temporary.write_bytes(b"".join(whole))
            temporary.replace(path)
        try:
            for line in whole:
                entry = json.loads(line)
                self.items[entry["key"]] = entry["item"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path} is damaged: {error}.", "Give another folder.") from error
