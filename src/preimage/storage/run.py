"""Runs: work in pieces that can be stopped at any moment and continued, in a folder or in memory alone.

``run.json`` holds the plan and, at the end, the results; a ledger (:mod:`preimage.storage.ledger`) has every
finished piece; ``record.jsonl`` has a line for every time the run was begun or continued: versions, machine,
date, command. The same plan continues a folder; another plan is refused, naming what differs and both values.
One process works in a folder at a time. Its pieces are done here or, where there are workers
(:mod:`preimage.storage.elsewhere`), by them; what is finished is in the ledger and nowhere else, so that it
does not matter who does the rest.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from preimage.errors import RunFolderError, UnwritableError, first_line
from preimage.progress import Progress, silent
from preimage.storage.elsewhere import Errand, current_workers
from preimage.storage.files import SCHEMA, plain, read_json, sha256_document, write_json, write_table
from preimage.storage.ledger import Ledger, append, ledger_in
from preimage.storage.locking import SIGNS, Hold, hold
from preimage.storage.places import CHECK, Place, exists, is_remote, kind_of, names_in, place_of, remove_all
from preimage.storage.plans import require_same
from preimage.storage.records import record
from preimage.storage.saved import decode
from preimage.storage.shelf import FolderShelf

RUN, RECORD = "run.json", "record.jsonl"
SUM = "sha256"  # of everything else in run.json
Key = TypeVar("Key", bound=int | str)
Item = TypeVar("Item")


def inside(out: str | Path | Place | None, name: str) -> Place | None:
    """A folder for a part of the work below the one for all of it; None where there is none."""
    return None if out is None else place_of(out) / name


class Run:
    """One run, begun or continued on construction; without ``out`` nothing of it outlives the process.

    ``name_command``: whether the record has the command, which may have the text of a prompt.
    """

    def __init__(
        self, plan: dict[str, Any], out: str | Path | Place | None, *, name_command: bool = True
    ) -> None:
        self._lasts = out is not None
        if out is None and current_workers() is not None:  # who must have a place to find things in
            temporary = tempfile.mkdtemp(prefix="preimage-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            out = Path(temporary) / "run"
        self.path: Place | None = None if out is None else place_of(out)
        self.items: dict[str, Any] = {}
        self.results: dict[str, Any] | None = None  # of a run that is done
        self._plan: dict[str, Any] = plain({"schema": SCHEMA, **plan})
        self._name_command = name_command
        self._ledger: Ledger | None = None
        self._hold = Hold()
        self._order: list[str] = []
        if self.path is not None:
            try:
                self._open(self.path)
            except BaseException:
                self._hold.leave()  # now, and not when the error is forgotten
                raise

    def place(self, name: str) -> Place | None:
        """A path in the run's folder, for what belongs to it until it is done; None where there is none."""
        return inside(self.path, name)

    def has(self, name: str) -> bool:
        """Whether there is something of this name in the run's folder."""
        try:
            return self.path is not None and exists(self.path / name)
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise RunFolderError(f"{self.path} cannot be read: {reason}.", CHECK) from error

    @property
    def shelf(self) -> FolderShelf | None:
        """Named bytes in the run's folder, which workers can reach too."""
        return None if self.path is None else FolderShelf(self.path)

    def done(self, keys: Iterable[Key]) -> list[Key]:
        """The keys of pieces that are finished."""
        return [key for key in keys if str(key) in self.items]

    def kept(self, keys: Iterable[Key], kind: type[Item]) -> dict[Key, Item]:
        """The finished pieces, each as the kind of thing that was kept."""
        return {key: self._decoded(kind, self.items[str(key)], "its ledger") for key in self.done(keys)}

    def result(self, kind: type[Item]) -> Item | None:
        """The results of a run that is done, as what they are; None of one that is not."""
        return None if self.results is None else self._decoded(kind, self.results, RUN)

    def left(self, keys: Iterable[Key]) -> list[Key]:
        """The keys of pieces that are not finished yet."""
        return [key for key in keys if str(key) not in self.items]

    def each(
        self,
        keys: Sequence[Key],
        kind: type[Item],
        work: Callable[[tuple[Key, ...]], Iterable[Item]],
        progress: Progress = silent,
        note: str = "",
        *,
        groups: Sequence[tuple[Key, ...]] | None = None,
        errand: Errand | None = None,
    ) -> dict[Key, Item]:
        """Have every piece finished: what was kept, and the rest, done now and kept as it gets finished.

        ``work`` does the pieces of a group and gives what came of each, in their order; without ``groups``
        (of what is left) each is alone. With an ``errand`` they are done elsewhere where there is anybody.
        Progress is told in pieces, before and after each group.
        """
        finished = self.kept(keys, kind)
        progress(len(finished), len(keys), note)
        left = [(key,) for key in self.left(keys)] if groups is None else groups
        workers = current_workers() if errand is not None and len(left) > 1 else None
        self._order = [str(key) for key in keys]
        if workers is None or errand is None or self.path is None:
            for group in left:
                for key, item in zip(group, work(group), strict=True):
                    self.keep(key, item)
                    finished[key] = item
                progress(len(finished), len(keys), note)
            return finished
        named = {tuple(map(str, group)): group for group in left}

        def here(names: tuple[str, ...]) -> list[Any]:
            return [_document(item) for item in work(named[names])]

        helping = here if errand.here_too else None
        for names, documents in workers.each(errand, list(named), errand.folder or self.path, helping):
            for key, document in zip(named[names], documents, strict=True):
                finished[key] = self._decoded(kind, document, "what a worker sent")
                self.keep(key, document)
                if errand.after is not None:
                    errand.after(str(key))
            progress(len(finished), len(keys), note)
        return finished

    def keep(self, key: int | str, item: Any) -> None:
        """Record the result of a finished piece; where there is a folder it is on the disk on return."""
        if self._ledger is None:
            return
        document = _document(item)
        self._hold.require()
        self._ledger.add(str(key), document)
        self.items[str(key)] = document

    def forget(self) -> None:
        """Take no piece for finished any more: what they left behind is gone."""
        self.items.clear()
        if self._ledger is not None:
            self._ledger.clear()

    def discard(self) -> None:
        """Remove the folder: what it was kept for is done, and written elsewhere."""
        if self.path is not None:
            remove_all(self.path)

    def finish(
        self,
        results: Callable[[], Any],
        tables: Mapping[str, Callable[[], list[dict[str, Any]]]] | None = None,
        remove: Sequence[str] = (),
    ) -> None:
        """Write the results beside the plan, then tables, and remove what only the work needed.

        Of a run that was done before only what is missing is written: it may have been stopped here.
        """
        if self.path is None or self._ledger is None or not self._lasts:
            return
        before = self.results is not None
        if not before:
            self._ledger.order(self._order)
            self._write({"state": "done", "results": results()})
        for name, rows in (tables or {}).items():
            if not (before and self.has(f"{name}.parquet")):
                write_table(self.path / f"{name}.parquet", rows())
        for name in remove:
            remove_all(self.path / name)
        self._hold.leave()

    def _open(self, path: Place) -> None:
        foreign = RunFolderError(f"{path} exists and is not a run folder.", "Give a new or empty folder.")
        try:
            if kind_of(path) == "file":
                raise foreign
            if not is_remote(path):
                path.mkdir(parents=True, exist_ok=True)
            self._hold = hold(path, self)
            begun = exists(path / RUN)
            others = [] if begun else [name for name in names_in(path) if not _ours(name)]
        except OSError as error:
            raise UnwritableError(
                f"{path} cannot be written: {error.strerror or first_line(error)}.",
                CHECK if is_remote(path) else "Give another place.",
            ) from error
        if others:
            raise foreign
        self._ledger = ledger_in(path)
        if begun:
            self._continue(path)
        else:
            self._write({"state": "running"})
        if self.results is None:
            self._record(path)

    def _record(self, path: Place) -> None:
        said = record(command=self._name_command)
        if is_remote(path):  # where nothing can be appended
            write_json(path / "record" / f"{said['date'].replace(':', '')}-{uuid.uuid4().hex[:8]}.json", said)
        else:
            append(path / RECORD, said)

    def _write(self, more: dict[str, Any]) -> None:
        assert self.path is not None
        self._hold.require(look=True)
        document = plain({**self._plan, **more})
        write_json(self.path / RUN, {**document, SUM: sha256_document(document)})

    def _decoded(self, kind: type[Item], value: Any, name: str) -> Item:
        try:
            item: Item = decode(kind, value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"{name} of {self.path} is damaged: {first_line(error)}.", "Give another folder."
            ) from error
        return item

    def _continue(self, path: Place) -> None:
        saved = read_json(path / RUN)
        require_same(path, saved, self._plan)  # first: another version has another checksum, or none
        digest = saved.pop(SUM, None)
        if digest != sha256_document(saved):
            raise RunFolderError(f"{path / RUN} fails its checksum.", "Give another folder.")
        if saved.get("state") == "done":
            self.results = saved.get("results")
        assert self._ledger is not None
        self.items = self._ledger.read()


def _document(item: Any) -> Any:
    """What is kept of an item, in plain json types."""
    if not isinstance(item, dict):
        item = item.to_dict() if hasattr(item, "to_dict") else asdict(item)
    return plain(item)


def _ours(name: str) -> bool:
    """Whether a file may be in a folder whose run was not begun: what a killed process was writing."""
    return name.endswith(".partial") or name == SIGNS
