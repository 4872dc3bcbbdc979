"""A cluster without machines: the driver's own :class:`Schedule`, asked by workers that only have clocks.

How long work takes on how many workers, what losses cost, and whether everything gets done, in seconds of
one core. What is not in it: a network that fills up, and machines that are slow for a while.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from preimage.cluster.schedule import ATTEMPTS, Schedule
from preimage.errors import OptionError

_JOINED, _DONE, _LOST = "joined", "done", "lost"


@dataclass(frozen=True)
class Machine:
    """Where one worker lives, and the next when that is lost.

    ``speed``: pieces of one second done in a second. ``start_up``: seconds from the start of a worker until
    it is there. Workers are lost after ``mean_seconds_to_loss``, exponentially distributed from their start
    on, and at the exact seconds of ``losses``, counted from the beginning of the work. ``ready``: its first
    worker is there from the beginning, of work done before.
    """

    speed: float = 1.0
    start_up: float = 0.0
    mean_seconds_to_loss: float = math.inf
    losses: tuple[float, ...] = ()
    ready: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise OptionError(f"speed is {self.speed}.", "Give a positive number.")
        if not 0 <= self.start_up < math.inf:
            raise OptionError(f"start_up is {self.start_up}.", "Give seconds, 0 or more.")
        if not self.mean_seconds_to_loss > 0:
            raise OptionError(
                f"mean_seconds_to_loss is {self.mean_seconds_to_loss}.", "Give positive seconds, or infinity."
            )


@dataclass(frozen=True)
class SimulatedRun:
    """What came of a simulation; times in seconds.

    ``busy_share``: of all machines' time until ``makespan``, what went into pieces that were finished.
    ``repeated``: pieces begun and lost with their worker, each time they were; ``wasted``: what had gone into
    them, in seconds of their machines. ``poisoned``: pieces that were given up. ``hopeless``: the driver has
    given up, and what is neither done nor poisoned was not tried to the end.
    """

    makespan: float
    busy_share: float
    done: int
    losses: int
    repeated: int
    wasted: float
    poisoned: tuple[int, ...]
    hopeless: bool
    seed: int


@dataclass
class _Worker:
    """One worker: what was handed to it and when each of these begins, in the order of handing out."""

    machine: Machine
    handed: dict[int, float] = field(default_factory=dict)
    free: float = 0.0  # when all that it has is done
    there: bool = False
    gone: bool = False  # lost with nothing in hand, and nobody knows


def simulate(
    pieces: Sequence[float],
    machines: Sequence[Machine],
    *,
    latency: float = 0.0,
    replacement: float = 0.0,
    poison: Collection[int] = (),
    attempts: int = ATTEMPTS,
    seed: int = 0,
) -> SimulatedRun:
    """The work of ``pieces``, given in seconds at speed 1, on a cluster of these machines.

    ``latency``: seconds for which the driver is busy with every message (a worker is there, has finished, is
    lost), one after another. ``replacement``: seconds from there until a lost worker's successor starts.
    ``poison``: pieces, by their index, that end their worker instead of getting finished. As on a real
    cluster, that an idle worker is lost is noticed when it is given a piece. A million pieces take about ten
    seconds.

    >>> simulate([1.0] * 6, [Machine(), Machine()]).makespan
    3.0
    """
    if not machines:
        raise OptionError("There are no machines.", "Give at least one.")
    if not all(0 <= seconds < math.inf for seconds in (*pieces, latency, replacement)):
        raise OptionError("A duration is negative or not finite.", "Give seconds, 0 or more.")
    run = _Simulation(pieces, machines, latency, replacement, frozenset(poison), attempts, seed)
    return run.result()


class _Simulation:
    """Events in the order of their times, each handled by the one driver."""

    def __init__(
        self,
        pieces: Sequence[float],
        machines: Sequence[Machine],
        latency: float,
        replacement: float,
        poison: frozenset[int],
        attempts: int,
        seed: int,
    ) -> None:
        self._pieces, self._machines, self._poison = pieces, machines, poison
        self._latency, self._replacement = latency, replacement
        self._seed, self._random = seed, random.Random(seed)
        self._schedule = Schedule(range(len(pieces)), attempts, workers=len(machines))
        self._events: list[tuple[float, int, str, int, int]] = []  # second, order, what, worker, piece
        self._order = 0
        self._workers: dict[int, _Worker] = {}
        self._numbers = 0
        self._driver = 0.0  # the second up to which the driver is busy
        self._worked = self._wasted = 0.0
        self._done = self._losses = self._repeated = 0

    def result(self) -> SimulatedRun:
        """Run until nothing is open."""
        for machine in self._machines:
            self._start(machine, 0.0, 0.0 if machine.ready else machine.start_up)
        while self._schedule.open and not self._schedule.hopeless:
            second, _, what, number, piece = heapq.heappop(self._events)
            worker = self._workers.get(number)
            if worker is None:
                continue  # of a worker that was lost before
            if what == _LOST and worker.there and not worker.handed:
                worker.gone = True
                continue
            self._driver = max(self._driver, second) + self._latency
            if what == _DONE:
                self._finish(number, worker, piece)
                self._hand_out(number)  # nobody else can have become entitled to more
                continue
            if what == _JOINED:
                worker.there = True
                self._schedule.join(number)
            else:
                self._lose(number, worker, second)
            for each in [each for each, other in self._workers.items() if other.there]:
                self._hand_out(each)
        available = self._driver * len(self._machines)
        return SimulatedRun(
            makespan=self._driver,
            busy_share=self._worked / available if available else 1.0,
            done=self._done,
            losses=self._losses,
            repeated=self._repeated,
            wasted=self._wasted,
            poisoned=tuple(sorted(self._schedule.poisoned)),
            hopeless=self._schedule.hopeless,
            seed=self._seed,
        )

    def _push(self, second: float, what: str, number: int, piece: int = -1) -> None:
        heapq.heappush(self._events, (second, self._order, what, number, piece))
        self._order += 1

    def _start(self, machine: Machine, second: float, start_up: float) -> None:
        """Start a worker on a machine; when it will be there, and when it will be lost."""
        number = self._numbers
        self._numbers += 1
        self._workers[number] = _Worker(machine)
        self._push(second + start_up, _JOINED, number)
        lost = min((known for known in machine.losses if known > second), default=math.inf)
        if machine.mean_seconds_to_loss < math.inf:
            lost = min(lost, second + self._random.expovariate(1 / machine.mean_seconds_to_loss))
        if lost < math.inf:
            self._push(lost, _LOST, number)

    def _hand_out(self, number: int) -> None:
        """Give a worker as much as the schedule lets it have."""
        worker = self._workers[number]
        while (piece := self._schedule.next(number)) is not None:
            began = max(self._driver, worker.free)
            worker.handed[piece] = began
            if worker.gone:
                self._push(self._driver, _LOST, number)
                continue
            worker.free = began + self._pieces[piece] / worker.machine.speed
            self._push(worker.free, _LOST if piece in self._poison else _DONE, number, piece)

    def _finish(self, number: int, worker: _Worker, piece: int) -> None:
        del worker.handed[piece]
        self._schedule.finished(number, piece)
        self._done += 1
        self._worked += self._pieces[piece] / worker.machine.speed

    def _lose(self, number: int, worker: _Worker, second: float) -> None:
        """A worker and what it had are lost; another is started."""
        del self._workers[number]
        begun = [] if worker.gone else [since for since in worker.handed.values() if since < second]
        self._repeated += len(begun)
        self._wasted += sum(second - since for since in begun)
        self._losses += 1
        self._schedule.lost(number, "lost")
        self._start(worker.machine, self._driver + self._replacement, worker.machine.start_up)
