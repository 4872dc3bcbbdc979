"""Which piece of work goes to which worker next, and what becomes of pieces whose worker was lost.

No clock, no network and no engine: the cluster and its simulation ask the same object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

ATTEMPTS = 5  # workers that one piece may cost before it is left alone
BARREN = 10  # workers lost one after another, beside two for each there was, with nothing finished between


Piece = TypeVar("Piece", bound=Hashable)


class Schedule(Generic[Piece]):
    """Pieces waiting, pieces under way, and pieces that were given up.

    A worker has one piece under way and, while as many wait as there are workers, a second behind it, so that
    it never waits for the next. ``workers``: how many are to come; the first who comes leaves work for them.
    What a lost worker was doing goes to the end of the queue, and what stood behind that to its front:
    nothing was wrong with it. A piece that was under way at so many losses or failures is left alone, for
    whoever reads ``poisoned``.
    """

    def __init__(self, pieces: Sequence[Piece], attempts: int = ATTEMPTS, *, workers: int = 0) -> None:
        self._waiting = deque(pieces)
        self._attempts = attempts
        self._workers = workers  # the most there were, or are to be
        self._held: dict[Hashable, list[Piece]] = {}
        self._blamed: Counter[Piece] = Counter()
        self._barren = 0
        self._fruitful = False  # whether anything was ever finished
        self.poisoned: dict[Piece, str] = {}  # and what was said last of each

    @property
    def open(self) -> bool:
        """Whether anything is waiting or under way."""
        return bool(self._waiting) or any(self._held.values())

    @property
    def hopeless(self) -> bool:
        """Whether workers are lost again and again and nothing gets finished."""
        return self._barren >= BARREN + 2 * self._workers

    def join(self, worker: Hashable) -> None:
        """A worker is there."""
        self._held[worker] = []
        self._workers = max(self._workers, len(self._held))

    def next(self, worker: Hashable) -> Piece | None:
        """What a worker is to do now or right afterwards; nothing where it has enough."""
        held = self._held[worker]
        if not self._waiting or len(held) > 1 or (held and len(self._waiting) < self._workers):
            return None
        held.append(self._waiting.popleft())
        return held[-1]

    def take(self) -> Piece | None:
        """The next piece for whoever does it at once and cannot be lost: the driver itself."""
        return self._waiting.popleft() if self._waiting else None

    def finished(self, worker: Hashable, piece: Piece) -> None:
        """A worker has done its piece."""
        self._held[worker].remove(piece)
        self._barren = 0
        self._fruitful = True

    def failed(self, worker: Hashable, piece: Piece, reason: str) -> None:
        """A piece ended in an error that may not be its own; the worker is still there."""
        self._held[worker].remove(piece)
        self._blame(piece, reason)

    def lost(self, worker: Hashable, reason: str) -> None:
        """A worker is gone, and all that it had."""
        held = self._held.pop(worker, [])
        self._waiting.extendleft(reversed(held[1:]))
        if held:
            self._blame(held[0], reason)
        # Once workers have shown that they can finish, who dies of a piece that others died of is no evidence
        # against the cluster: the last pieces may all be such, and each is tried until it is left alone.
        if not (held and self._fruitful and self._blamed[held[0]] > 1):
            self._barren += 1

    def _blame(self, piece: Piece, reason: str) -> None:
        self._blamed[piece] += 1
        if self._blamed[piece] < self._attempts:
            self._waiting.append(piece)
        else:
            self.poisoned[piece] = reason
