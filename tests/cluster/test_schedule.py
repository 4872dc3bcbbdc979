"""Which piece goes to whom, and what becomes of it when its worker is lost: step by step, and in whole runs.

No Ray here: the schedule knows of no engine, and the simulation asks the very class that the engine asks.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from preimage.cluster import Machine, Schedule, SimulatedRun, simulate
from preimage.cluster.schedule import ATTEMPTS, BARREN
from preimage.errors import OptionError

simulation = __import__("preimage.cluster.simulation", fromlist=["simulation"])


class Watched(Schedule[Any]):
    """A schedule that refuses to be used, or to behave, as it must not."""

    def __init__(self, pieces: Any, *options: Any, **named: Any) -> None:
        super().__init__(pieces, *options, **named)
        self.all = list(pieces)
        self.holders: dict[Any, Any] = {}  # of every piece that is out
        self.tries: dict[Any, int] = dict.fromkeys(self.all, 0)  # how often it was under way at a loss
        self.done: list[Any] = []

    def next(self, worker: Any) -> Any:
        piece = super().next(worker)
        if piece is not None:
            assert piece not in self.holders, f"{piece} is with two workers"
            assert piece not in self.done
            assert piece not in self.poisoned
            self.holders[piece] = worker
            assert sum(whose == worker for whose in self.holders.values()) <= 2
        return piece

    def finished(self, worker: Any, piece: Any) -> None:
        assert self.holders.pop(piece) == worker
        self.done.append(piece)
        super().finished(worker, piece)

    def lost(self, worker: Any, reason: str) -> None:
        mine = [piece for piece, whose in self.holders.items() if whose == worker]  # in the order handed out
        for piece in mine:
            del self.holders[piece]
        super().lost(worker, reason)
        if mine:
            self.tries[mine[0]] += 1
            assert self.tries[mine[0]] <= self._attempts

    def check_end(self) -> None:
        """Every piece once, done or given up, unless the cluster was."""
        assert len(set(self.done)) == len(self.done)
        assert not set(self.done) & set(self.poisoned)
        if not self.hopeless:
            assert sorted([*self.done, *self.poisoned]) == sorted(self.all)
        for piece in self.poisoned:
            assert self.tries[piece] == self._attempts


@contextmanager
def watching() -> Iterator[list[Watched]]:
    """Inside, the schedules of simulations are watched, and here they are."""
    made: list[Watched] = []

    def make(*given: Any, **named: Any) -> Watched:
        made.append(Watched(*given, **named))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "Schedule", make)
        yield made


def staffed(pieces: int, there: int, **options: Any) -> Schedule[int]:
    schedule: Schedule[int] = Schedule(range(pieces), **options)
    for worker in range(there):
        schedule.join(worker)
    return schedule


def taken(schedule: Schedule[int], worker: int) -> list[int]:
    """All that a worker gets now."""
    return list(iter(lambda: schedule.next(worker), None))


# One schedule, step by step.


def test_a_worker_has_two_pieces_while_enough_wait() -> None:
    schedule = staffed(7, 2)
    assert [taken(schedule, 0), taken(schedule, 1)] == [[0, 1], [2, 3]]
    assert taken(schedule, 0) == []
    schedule.finished(0, 0)
    assert taken(schedule, 0) == [4]
    schedule.finished(1, 2)
    schedule.finished(1, 3)
    assert taken(schedule, 1) == [5]  # one piece waits and there are two workers
    schedule.finished(0, 1)
    assert taken(schedule, 0) == []
    schedule.finished(0, 4)
    assert taken(schedule, 0) == [6]


@pytest.mark.parametrize("count", range(1, 9))
def test_who_comes_first_leaves_a_piece_for_everyone_who_is_to_come(count: int) -> None:
    schedule = staffed(count, 0, workers=count)
    for worker in range(count):
        schedule.join(worker)
        assert taken(schedule, worker) == [worker]


def test_what_stood_behind_a_lost_piece_is_next_and_is_not_blamed() -> None:
    schedule = staffed(6, 1, attempts=1)
    assert taken(schedule, 0) == [0, 1]
    schedule.lost(0, "power")
    assert schedule.poisoned == {0: "power"}
    schedule.join(1)
    assert taken(schedule, 1) == [1, 2]  # a single blame would have poisoned it


def test_a_lost_piece_goes_to_the_end_of_the_queue() -> None:
    schedule = staffed(4, 1)
    assert taken(schedule, 0) == [0, 1]
    schedule.lost(0, "power")
    schedule.join(1)
    order: list[int] = []
    for done in range(4):
        order += taken(schedule, 1)
        schedule.finished(1, order[done])
    assert order == [1, 2, 3, 0]


def test_after_its_last_attempt_a_piece_is_left_alone_with_what_was_said_last() -> None:
    schedule = staffed(1, 1)
    for number in range(ATTEMPTS):
        assert schedule.open
        assert taken(schedule, 0) == [0]
        schedule.failed(0, 0, f"reason {number}")
    assert schedule.poisoned == {0: f"reason {ATTEMPTS - 1}"}
    assert not schedule.open
    assert not schedule.hopeless  # its worker is alive


def test_failures_and_losses_are_blamed_alike() -> None:
    schedule = staffed(1, 1, attempts=2)
    assert taken(schedule, 0) == [0]
    schedule.failed(0, 0, "an error")
    assert taken(schedule, 0) == [0]
    schedule.lost(0, "power")
    assert schedule.poisoned == {0: "power"}


def test_a_worker_that_never_came_can_be_lost() -> None:
    schedule = staffed(3, 1)
    schedule.lost("another", "did not start")
    assert taken(schedule, 0) == [0, 1]


def test_workers_that_never_come_are_hopeless() -> None:
    schedule = staffed(3, 0, workers=4)
    for number in range(BARREN + 2 * 4):
        assert not schedule.hopeless
        schedule.lost(number, "did not start")
    assert schedule.hopeless


@pytest.mark.parametrize("workers", [1, 16, 512])
def test_all_workers_lost_at_once_are_not_hopeless(workers: int) -> None:
    schedule = staffed(4 * workers, workers)
    for worker in range(workers):
        taken(schedule, worker)
    for worker in range(workers):
        schedule.lost(worker, "the power went")
        assert not schedule.hopeless
    assert not schedule.poisoned


def test_pieces_that_kill_are_named_though_nothing_else_is_left() -> None:
    schedule = staffed(8, 1)
    assert taken(schedule, 0) == [0, 1]
    schedule.finished(0, 0)
    worker = 0
    while schedule.open:
        assert not schedule.hopeless
        taken(schedule, worker)
        schedule.lost(worker, "memory")
        worker += 1
        schedule.join(worker)
    assert sorted(schedule.poisoned) == list(range(1, 8))


def test_workers_that_only_die_are_hopeless_even_after_good_times() -> None:
    schedule = staffed(1000, 2)
    assert taken(schedule, 0) == [0, 1]
    schedule.finished(0, 0)
    for worker in range(BARREN + 2 * 2):
        assert not schedule.hopeless
        taken(schedule, worker)
        schedule.lost(worker, "the disk is full")
        schedule.join(worker + 2)
    assert schedule.hopeless


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens to workers in whatever order."""

    @initialize(pieces=st.integers(0, 12), workers=st.integers(0, 4), attempts=st.integers(1, 3))
    def begin(self, pieces: int, workers: int, attempts: int) -> None:
        self.schedule = Watched(range(pieces), attempts, workers=workers)
        self.there: dict[int, list[int]] = {}
        self.numbers = 0

    @precondition(lambda self: len(self.there) < 4)
    @rule()
    def join(self) -> None:
        self.schedule.join(self.numbers)
        self.there[self.numbers] = []
        self.numbers += 1

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.there)))
        self.there[worker] += taken(self.schedule, worker)

    @precondition(lambda self: any(self.there.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(one for one, held in self.there.items() if held)))
        self.schedule.finished(worker, self.there[worker].pop(0))
        assert not self.schedule.hopeless

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.there)))
        before = dict(self.schedule._blamed)
        held = self.there.pop(worker)
        self.schedule.lost(worker, "lost")
        blamed = [piece for piece, count in self.schedule._blamed.items() if count != before.get(piece, 0)]
        assert blamed == held[:1]

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not hasattr(self, "schedule"):
            return
        out = [piece for held in self.there.values() for piece in held]
        waiting = list(self.schedule._waiting)
        everything = [*out, *waiting, *self.schedule.done, *self.schedule.poisoned]
        assert sorted(everything) == sorted(self.schedule.all)
        assert self.schedule.open == bool(out or waiting)

    def teardown(self) -> None:
        if not hasattr(self, "schedule"):
            return
        last = "the last"
        self.schedule.join(last)
        for worker, held in self.there.items():
            for piece in held:
                self.schedule.finished(worker, piece)
        while self.schedule.open:
            for piece in taken(self.schedule, last):  # type: ignore[arg-type]
                self.schedule.finished(last, piece)
        self.schedule.check_end()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)


# Whole runs.

seconds = st.floats(0, 100, allow_subnormal=False)
speeds = st.floats(0.25, 4)
healthy = st.lists(st.builds(Machine, speed=speeds, start_up=st.floats(0, 20)), min_size=1, max_size=6)
some_losses = st.lists(st.floats(0.1, 300), max_size=4).map(tuple)
mortal = st.lists(
    st.builds(Machine, speed=speeds, start_up=st.floats(0, 20), losses=some_losses), min_size=1, max_size=6
)
failing = st.lists(
    st.builds(Machine, speed=speeds, start_up=st.floats(0, 20), mean_seconds_to_loss=st.floats(5, 500)),
    min_size=1,
    max_size=6,
)


def test_an_example_by_hand() -> None:
    # Piece 0 is lost with its worker at 1 s, while the other has piece 1; a new one is there at 4 s.
    found = simulate([4.0, 4.0], [Machine(losses=(1.0,)), Machine()], replacement=3.0)
    assert found == SimulatedRun(
        makespan=8.0, busy_share=0.5, done=2, losses=1, repeated=1, wasted=1.0, poisoned=(), hopeless=False,
        seed=0,
    )  # fmt: skip


def test_a_ready_machine_starts_only_its_next_worker() -> None:
    found = simulate([4.0], [Machine(start_up=10.0, losses=(1.0,), ready=True)], replacement=3.0)
    assert found.makespan == 1.0 + 3.0 + 10.0 + 4.0


def test_nothing_to_do_takes_no_time() -> None:
    found = simulate([], [Machine()])
    assert (found.makespan, found.done, found.hopeless) == (0.0, 0, False)


def test_the_driver_is_one() -> None:
    found = simulate([0.0] * 1000, [Machine()] * 10, latency=0.01)
    assert found.makespan == pytest.approx(0.01 * (1000 + 10))


def test_as_many_pieces_as_workers_take_one_piece_s_time_however_they_come() -> None:
    found = simulate([100.0] * 64, [Machine(start_up=float(at)) for at in range(64)])
    assert found.makespan == 163.0


def test_options_that_mean_nothing_are_refused() -> None:
    for wrong in ({"speed": 0.0}, {"start_up": -1.0}, {"mean_seconds_to_loss": 0.0}, {"speed": math.nan}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Machine(**wrong)
    with pytest.raises(OptionError, match="no machines"):
        simulate([1.0], [])
    for pieces, latency in (([-1.0], 0.0), ([math.nan], 0.0), ([1.0], -1.0)):
        with pytest.raises(OptionError, match="duration"):
            simulate(pieces, [Machine()], latency=latency)


def test_a_result_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        simulate([1.0], [Machine()]).done = 3  # type: ignore[misc]


@given(pieces=st.lists(seconds, max_size=40), machines=failing, seed=st.integers(0, 9))
def test_the_same_seed_gives_the_same_run(pieces: list[float], machines: list[Machine], seed: int) -> None:
    first = simulate(pieces, machines, latency=0.01, replacement=5, seed=seed)
    assert first == simulate(pieces, machines, latency=0.01, replacement=5, seed=seed)
    assert first.seed == seed


@given(pieces=st.lists(seconds, max_size=40), machines=healthy)
@example(pieces=[1.0, 1.0], machines=[Machine(), Machine(start_up=0.5)])
def test_with_no_losses_the_time_is_that_of_list_scheduling(
    pieces: list[float], machines: list[Machine]
) -> None:
    """While any piece waits everybody works, and then nobody has more than two."""
    found = simulate(pieces, machines)
    work, speed = sum(pieces), sum(machine.speed for machine in machines)
    slowest = min(machine.speed for machine in machines)
    late = max(machine.start_up for machine in machines)
    assert found.done == len(pieces)
    assert found.losses == found.repeated == found.wasted == 0
    assert found.makespan >= work / speed * (1 - 1e-9)
    longest = sum(sorted(pieces)[-2:]) / slowest
    assert found.makespan <= (late + work / speed + longest) * (1 + 1e-9)
    assert found.busy_share <= 1 + 1e-9


@given(
    pieces=st.lists(seconds, max_size=30), machines=failing, seed=st.integers(0, 99),
    latency=st.sampled_from([0.0, 0.1, 3.0]), poison=st.sets(st.integers(0, 29), max_size=3),
)  # fmt: skip
def test_every_piece_is_finished_once_or_given_up(
    pieces: list[float], machines: list[Machine], seed: int, latency: float, poison: set[int]
) -> None:
    with watching() as made:
        found = simulate(pieces, machines, latency=latency, replacement=5, poison=poison, seed=seed)
    (schedule,) = made
    schedule.check_end()
    assert found.done == len(schedule.done)
    assert found.poisoned == tuple(sorted(schedule.poisoned))
    assert not poison & set(schedule.done)
    assert found.makespan * sum(machine.speed for machine in machines) >= (
        sum(pieces[piece] for piece in schedule.done) * (1 - 1e-9)
    )


@given(
    pieces=st.lists(seconds, min_size=1, max_size=30), machines=mortal, latency=st.sampled_from([0.0, 0.1])
)
def test_whoever_is_lost_whenever_the_same_pieces_are_finished(
    pieces: list[float], machines: list[Machine], latency: float
) -> None:
    """As long as no piece is given up, which many attempts see to, and the cluster is not."""
    losses = sum(len(machine.losses) for machine in machines)
    found = simulate(pieces, machines, latency=latency, replacement=1, attempts=losses + 1)
    assert found.losses <= losses
    assert found.hopeless or found.done == len(pieces)
    assert not found.poisoned
    if losses < BARREN + 2 * len(machines):
        assert not found.hopeless


@given(
    good=st.integers(1, 40), bad=st.integers(0, 8), workers=st.integers(1, 8), first=st.booleans(),
    latency=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_what_kills_stops_nothing_else(
    good: int, bad: int, workers: int, first: bool, latency: float
) -> None:
    pieces = range(good + bad)
    poison = set(pieces[:bad] if first else pieces[good:])
    found = simulate([3.0] * (good + bad), [Machine(start_up=1)] * workers, latency=latency, poison=poison)
    assert not found.hopeless
    assert (found.done, set(found.poisoned)) == (good, poison)
    assert found.losses == found.repeated == ATTEMPTS * bad
    assert found.wasted == pytest.approx(3.0 * ATTEMPTS * bad)


@given(pieces=st.integers(1, 200), workers=st.integers(1, 12), start_up=st.sampled_from([0.0, 50.0]))
def test_workers_that_finish_nothing_are_given_up(pieces: int, workers: int, start_up: float) -> None:
    """Each is lost after its first ten seconds, before it is there or in the middle of its first piece."""
    always = tuple(10.0 * at for at in range(1, 2000))
    machines = [Machine(start_up=start_up, losses=always)] * workers
    found = simulate([60.0] * pieces, machines)
    assert found.done == 0
    assert found.hopeless or len(found.poisoned) == pieces
    assert found.losses <= BARREN + 2 * workers + 1
    if pieces * ATTEMPTS >= BARREN + 2 * workers or start_up:
        assert found.hopeless


@given(workers=st.integers(1, 12), seed=st.integers(0, 9))
def test_workers_that_finish_some_are_not_given_up(workers: int, seed: int) -> None:
    """Nearly half of all tries end in a loss; with so many attempts, no piece is given up either."""
    machines = [Machine(mean_seconds_to_loss=20.0, start_up=1.0)] * workers
    found = simulate([10.0] * 200, machines, replacement=2, attempts=50, seed=seed)
    assert not found.hopeless
    assert found.done == 200
    assert found.losses > 20


def test_a_few_hundred_pieces_take_milliseconds() -> None:
    machines = [Machine(start_up=10, mean_seconds_to_loss=500)] * 8
    began = time.perf_counter()
    found = simulate([10.0] * 300, machines, latency=0.01, replacement=5)
    assert found.done == 300
    assert time.perf_counter() - began < 0.5  # a hundredth of it on an idle core


def test_neither_ray_nor_torch_is_needed() -> None:
    code = (
        "import sys; from preimage.cluster import Machine, Schedule, simulate; "
        "simulate([1.0], [Machine()]); assert not {'ray', 'torch'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
