"""A search for cases that do not end as they must: cases made of others, counted, and faults kept."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz.judging import Fault, judge
from fuzz.shortening import shorten
from fuzz.targets import TARGETS

PARENTS = 200  # accepted cases that others are made of, beside the seeds
CURRENT = "current"  # the file of the case under way, for whoever is left if it ends the process
REPORTED = 2.0  # seconds between reports of what was counted


class Search:
    """Cases of one target: how many ended how; the shortest case of each fault is kept in ``folder``."""

    def __init__(self, name: str, folder: Path, seconds: float | None, cases: int | None) -> None:
        self.name, self.target, self.folder = name, TARGETS[name], folder
        self.counts: Counter[str] = Counter(cases=0, accepted=0, refused=0, faults=0)
        self.faults: dict[str, dict[str, Any]] = {}
        self._most = None if cases is None else cases // self.target.slow
        self._began = self._reported = time.monotonic()
        self._end = None if seconds is None else self._began + seconds
        self._current = (folder / CURRENT).open("wb", buffering=0)
        self.report()

    def left(self) -> bool:
        """Whether time and cases are left."""
        if self._most is not None and self.counts["cases"] >= self._most:
            return False
        return self._end is None or time.monotonic() < self._end

    def begin(self) -> list[bytes]:
        """The seeds, each of them tried: a whole file that is refused is a fault too."""
        seeds = self.target.begin()
        for seed in seeds:
            with suppress(Exception):  # what is imported late is imported now, when nobody watches
                self.target.read(seed)
        for seed in seeds:
            if self.try_case(seed) is False:
                self._add(Fault("a whole file is refused", "seeds"), seed)
        return seeds

    def try_case(self, data: bytes) -> bool | None:
        """Whether a case was accepted, counted; None: it was a fault."""
        self._current.seek(0)
        self._current.truncate()
        self._current.write(data)
        self.counts["cases"] += 1
        try:
            accepted = judge(self.target.read, data)
        except Fault as fault:
            self._add(fault, data)
            return None
        self.counts["accepted" if accepted else "refused"] += 1
        if time.monotonic() > self._reported + REPORTED:
            self.report()
        return accepted

    def _add(self, fault: Fault, data: bytes) -> None:
        self.counts["faults"] += 1
        known = self.faults.setdefault(fault.place, {"what": fault.what, "file": None, "times": 0})
        known["times"] += 1
        if known["times"] == 1:
            before = time.monotonic()
            data = shorten(data, lambda shorter: _place_of(self.target.read, shorter) == fault.place)
            known["file"] = f"{self.name}-{re.sub(r'[^a-z0-9]+', '-', fault.place.lower())}.case"
            (self.folder / known["file"]).write_bytes(data)
            if self._end is not None:  # time for the search, which this was not
                self._end += time.monotonic() - before
        self.report()

    def report(self, *, done: bool = False) -> None:
        """What was counted so far, for whoever asks after this process is gone."""
        self._reported = time.monotonic()
        seconds = round(self._reported - self._began, 1)
        known = {**self.counts, "seconds": seconds, "found": self.faults, "done": done}
        (self.folder / f"{self.name}.json").write_text(json.dumps(known), encoding="utf-8")


def _place_of(read: Any, data: bytes) -> str | None:
    try:
        judge(read, data)
    except Fault as fault:
        return fault.place
    return None


def search(one: Search, seed: int) -> None:
    """Cases of changes alone, the same for the same seed: of whole files, and of changed ones that passed."""
    rng = random.Random(f"{one.name} {seed}")
    parents = Parents(one.begin(), rng)
    while one.left():
        data = one.target.mutated(next(parents), rng)
        if one.try_case(data):
            parents.add(data)
    one.report(done=True)


class Parents:
    """Whole files and the latest of the changed ones that were accepted, drawn at random."""

    def __init__(self, seeds: list[bytes], rng: random.Random) -> None:
        self._seeds, self._others, self._rng = seeds, list[bytes](), rng

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return self._rng.choice(self._others if self._others and self._rng.random() < 0.5 else self._seeds)

    def add(self, data: bytes) -> None:
        """One more, in place of another where there are many."""
        if len(self._others) < PARENTS:
            self._others.append(data)
        else:
            self._others[self._rng.randrange(PARENTS)] = data
