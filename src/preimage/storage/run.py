"""Runs: work in pieces that can be stopped at any moment and continued, in a folder or in memory alone.

``run.json`` holds the plan and, at the end, the results; ``items.jsonl`` has a line for every finished piece;
``record.jsonl`` has one for every time the run was begun or continued: versions, machine, date, command.
The same plan continues a folder; another plan is refused, naming what differs and both values. One process
works in a folder at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from preimage.errors import RunFolderError, UnwritableError
from preimage.progress import Progress, silent
from preimage.storage.files import SCHEMA, plain, read_json, write_json, write_table
from preimage.storage.locking import hold
from preimage.storage.plans import require_same
from preimage.storage.records import record
from preimage.storage.saved import decode

_RUN, _ITEMS, _RECORD = "run.json", "items.jsonl", "record.jsonl"
Key = TypeVar("Key", bound=int | str)
Piece = TypeVar("Piece")
Item = TypeVar("Item")


def inside(out: str | Path | None, name: str) -> Path | None:
    """A folder for a part of the work below the one for all of it; None where there is none."""
    return None if out is None else Path(out) / name


class Run:
    """One run, begun or continued on construction; without ``out`` nothing of it outlives the process.

    ``name_command``: whether the record has the command, which may have the text of a prompt.
    """

    def __init__(self, plan: dict[str, Any], out: str | Path | None, *, name_command: bool = True) -> None:
        self.path = None if out is None else Path(out)
        self.items: dict[str, Any] = {}
        self.results: dict[str, Any] | None = None  # of a run that is done
        self._plan: dict[str, Any] = plain({"schema": SCHEMA, **plan})
        self._name_command = name_command
        if self.path is not None:
            self._open(self.path)

    def place(self, name: str) -> Path | None:
        """A path in the run's folder, for what belongs to it until it is done; None where there is none."""
        return inside(self.path, name)

    def done(self, keys: Iterable[Key]) -> list[Key]:
        """The keys of pieces that are finished."""
        return [key for key in keys if str(key) in self.items]

    def kept(self, keys: Iterable[Key], kind: type[Item]) -> dict[Key, Item]:
        """The finished pieces, each as the kind of thing that was kept."""
        return {key: self._decoded(kind, self.items[str(key)], _ITEMS) for key in self.done(keys)}

    def result(self, kind: type[Item]) -> Item | None:
        """The results of a run that is done, as what they are; None of one that is not."""
        return None if self.results is None else self._decoded(kind, self.results, _RUN)

    def left(self, keys: Iterable[Key]) -> list[Key]:
        """The keys of pieces that are not finished yet."""
        return [key for key in keys if str(key) not in self.items]

    def each(
        self,
        pieces: Sequence[Piece],
        work: Callable[[Piece], None],
        progress: Progress = silent,
        note: str = "",
    ) -> None:
        """Do every piece that is not finished, one after another; progress is told before and after each.

        This is where work could run elsewhere: a piece keeps its results by :meth:`keep`, and nothing else.
        """
        progress(0, len(pieces), note)
        for done, piece in enumerate(pieces, start=1):
            if str(piece) not in self.items:
                work(piece)
            progress(done, len(pieces), note)

    def keep(self, key: int | str, item: Any) -> None:
        """Record the result of a finished piece; where there is a folder it is on the disk on return."""
        if self.path is None:
            return
        if not isinstance(item, dict):
            item = item.to_dict() if hasattr(item, "to_dict") else asdict(item)
        document = plain(item)
        self._append(self.path / _ITEMS, {"key": str(key), "item": document})
        self.items[str(key)] = document

    def forget(self) -> None:
        """Take no piece for finished any more: what they left behind is gone."""
        self.items.clear()
        if self.path is not None:
            (self.path / _ITEMS).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder: what it was kept for is done, and written elsewhere."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)

    def finish(
        self,
        results: Callable[[], Any],
        tables: Mapping[str, Callable[[], list[dict[str, Any]]]] | None = None,
        remove: Sequence[str] = (),
    ) -> None:
        """Write the results beside the plan, then tables, and remove what only the work needed."""
        if self.path is None:
            return
        write_json(self.path / _RUN, {**self._plan, "state": "done", "results": results()})
        for name, rows in (tables or {}).items():
            write_table(self.path / f"{name}.parquet", rows())
        for name in remove:
            place = self.path / name
            if place.is_file():
                place.unlink()
            shutil.rmtree(place, ignore_errors=True)

    def _open(self, path: Path) -> None:
        foreign = RunFolderError(f"{path} exists and is not a run folder.", "Give a new or empty folder.")
        if path.exists() and not path.is_dir():
            raise foreign
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableError(
                f"{path} cannot be written: {error.strerror}.", "Give another place."
            ) from error
        hold(path, self)
        if (path / _RUN).exists():
            self._continue(path)
        elif any(path.iterdir()):
            raise foreign
        else:
            write_json(path / _RUN, {**self._plan, "state": "running"})
        if self.results is None:
            self._append(path / _RECORD, record(command=self._name_command))

    def _decoded(self, kind: type[Item], value: Any, name: str) -> Item:
        try:
            item: Item = decode(kind, value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"{self.place(name)} is damaged: {error}.", "Give another folder."
            ) from error
        return item

    def _append(self, path: Path, entry: dict[str, Any]) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UnwritableError(
                f"{path} cannot be written: {error.strerror}.",
                "Make room and rerun the same command: it continues.",
            ) from error

    def _continue(self, path: Path) -> None:
        saved = read_json(path / _RUN)
        require_same(path, saved, self._plan)
        if saved.get("state") == "done":
            self.results = saved.get("results")
        if (path / _ITEMS).exists():
            self._read_items(path / _ITEMS)

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
