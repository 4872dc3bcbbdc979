"""Files and folders that somebody has: each looked at by every reader, and named for what it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from preimage.errors import OptionError, PreimageError, StatesError, clip, shown
from preimage.leak.holdings import Holding, Told
from preimage.leak.readers import bundles, llama_cpp, lmcache, plain_text, sglang, tensors, vllm
from preimage.progress import Progress, silent

Reader: TypeAlias = Callable[[Path, Told], Holding | None]
# The most specific first: names that only one engine gives, then first bytes, then names of tensors.
READERS: tuple[Reader, ...] = (
    vllm.read, lmcache.read, sglang.read, llama_cpp.read, tensors.read, plain_text.read,
)  # fmt: skip
_READ = (
    "What vLLM, SGLang, LMCache and llama.cpp keep is, and bundles of preimage, tensors in safetensors, npy, "
    "npz and torch files, and prompts in json."
)
_MOST = 1_000_000  # entries of all folders together
_LONGEST = 1000  # characters of a reason
_LAST = (".json", ".jsonl", ".ndjson", ".txt")  # which often belong to a file of states beside them


@dataclass(frozen=True)
class Found:
    """What lies at some paths: what was recognised, what was refused and why, and how many files else."""

    holdings: tuple[Holding, ...] = ()
    unread: tuple[tuple[Path, str], ...] = ()
    others: int = 0


def read_paths(paths: Sequence[Path], told: Told, progress: Progress = silent) -> Found:
    """What files, and folders with all that is in them, hold of prompts; no states are read for it.

    Symbolic links in folders are not followed, and only regular files are opened. What a reader refuses is
    in ``unread``, and so is a file that was given by itself and that nobody knows; where that is all that was
    given it is an error.
    """
    if not paths:
        raise OptionError("No files were given.", "Give files or folders.")
    walk = _Walk()
    for path in paths:
        walk.add(Path(path))
    held: dict[str, Holding] = {}  # by the real path of what was looked at
    refused: dict[str, PreimageError] = {}
    taken: set[str] = set()
    for done, (real, path) in enumerate(sorted(walk.files.items(), key=_comes_last)):
        progress(done, len(walk.files), "files")
        if real in taken:
            continue
        try:
            holding = _read(path, told)
        except PreimageError as error:
            refused[real] = error
            continue
        if holding is not None:
            held[real] = holding
            taken.update(os.path.realpath(other) for other in holding.paths if other != path)
        elif path in walk.given:
            refused[real] = StatesError(f"{shown(path.name)} is of no kind that is read.", _READ)
    progress(len(walk.files), len(walk.files), "files")
    if len(paths) == 1 and (only := os.path.realpath(paths[0])) in refused:
        raise refused[only]
    known = {*held, *refused, *taken}
    unread = [
        (path, _one_line(str(refused[real]), _LONGEST))
        for real, path in walk.files.items()
        if real in refused
    ]
    return Found(
        tuple(held[real] for real in walk.files if real in held),
        (*unread, *walk.unread),
        walk.others + sum(real not in known for real in walk.files),
    )


def _comes_last(item: tuple[str, Path]) -> bool:
    """Whether a file is looked at after all that may have it beside them."""
    return item[1].suffix.lower() in _LAST


def _read(path: Path, told: Told) -> Holding | None:
    """What the first reader says that knows a file, or a bundle."""
    try:
        for reader in (bundles.read,) if path.is_dir() else READERS:
            holding = reader(path, told)
            if holding is not None:
                return holding
    except OSError as error:
        raise StatesError(
            f"{shown(path.name)} cannot be read: {error.strerror or type(error).__name__}.",
            "Check who may read it.",
        ) from error
    return None


def _one_line(text: str, most: int = 300) -> str:
    """Text in which a path may stand that somebody else named, fit for one line."""
    return clip(text if text.isprintable() else ascii(text), most)


class _Walk:
    """Everything there is to look at, each once, in sorted order."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}  # by their real paths; folders among them are bundles
        self.given: set[Path] = set()  # those that were given by themselves
        self.unread: list[tuple[Path, str]] = []  # folders that cannot be looked into
        self.others = 0  # pipes, devices and the like
        self._count = 0  # entries of all folders so far

    def add(self, path: Path) -> None:
        """A file, or a folder and everything in it."""
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError) as error:
            raise StatesError(
                f"There is no file or folder {_one_line(str(path))}.", "Check the path."
            ) from error
        if stat.S_ISREG(mode):
            self.files.setdefault(os.path.realpath(path), path)
            self.given.add(path)
        elif stat.S_ISDIR(mode):
            self._add_folder(path)
        else:
            raise StatesError(f"{_one_line(str(path))} is neither a file nor a folder.", _READ)

    def _add_folder(self, top: Path) -> None:
        left = [(os.path.realpath(top), top, True)]
        while left:
            real, path, is_folder = left.pop()
            if not is_folder:
                self.files.setdefault(real, path)
                continue
            try:
                if bundles.is_bundle(path):
                    self.files.setdefault(real, path)
                    continue
                inside = self._entries_of(path)
            except OSError as error:
                self.unread.append((path, f"{shown(path.name)} cannot be looked into: {error.strerror}."))
                continue
            for entry in inside:
                if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                    folder = entry.is_dir(follow_symlinks=False)
                    left.append((os.path.join(real, entry.name), path / entry.name, folder))
                elif not entry.is_symlink():
                    self.others += 1

    def _entries_of(self, folder: Path) -> list[os.DirEntry[str]]:
        """What is in a folder, the last name first; refused where all folders have too much together."""
        with os.scandir(folder) as found:
            entries = list(islice(found, _MOST - self._count + 1))
        self._count += len(entries)
        if self._count > _MOST:
            raise StatesError(
                f"There are more than {_MOST:,} files and folders up to {_one_line(str(folder))}.",
                "Give folders with fewer, one after another.",
            )
        return sorted(entries, key=lambda entry: entry.name, reverse=True)
