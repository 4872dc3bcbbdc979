"""Workers on a Ray cluster: who they are, what each is doing, and what is done about those that are lost.

Ray's own restarts and retries are off: a lost worker is replaced here, and what it was doing goes to another
(:mod:`preimage.cluster.schedule`). What is finished is in the ledger of the run, and nowhere in the cluster.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Self

from preimage import errors
from preimage.cluster.actors import PROOF, Actor, Relay, error_of
from preimage.cluster.joining import LOCAL, joined, started
from preimage.cluster.schedule import Schedule
from preimage.cluster.worker import DONE, REFUSED, Answer, facts, packed
from preimage.errors import ClusterError, OptionError, PreimageError
from preimage.storage import Errand, Place, working_with
from preimage.storage.elsewhere import Group
from preimage.storage.places import address as address_of
from preimage.storage.places import remove_all
from preimage.storage.shelf import FolderShelf

log = logging.getLogger(__name__)

_CORES = 4  # that a worker on a CPU has, where there are many
_PATIENCE = 180.0  # seconds without any worker before the cluster is given up
# Threads that wait do not spin: a worker has as many as the driver, whatever its share of the cores.
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
_TURN = 1.0  # seconds after which the driver looks around though nothing has happened


class Member(NamedTuple):
    """A worker, from the start of its process on."""

    number: int
    actor: Any
    process: int = 0  # its id on its machine, once it has said so


class WorkerStats(NamedTuple):
    """What is known of a worker after its work."""

    pieces: int
    seconds: float  # of work, waiting left out
    peak_bytes: int


class Cluster:
    """Workers that do the pieces of every run begun while it is open.

    ``address``: ``local`` starts a cluster of this machine's cores and GPUs, which ends with it; HOST:PORT
    joins one that runs. ``workers``: how many, by default one for every GPU, or for every four cores where
    there is none (two at least). ``device``: cpu leaves GPUs alone. A worker loads the same model by its
    name and is refused if it has other weights; it must have the same versions of preimage and torch. It
    computes with as many threads as this process has when the cluster is opened (``torch.set_num_threads``),
    because the last bits of a product can depend on their number.

    >>> with preimage.Cluster("local", workers=2):            # doctest: +SKIP
    ...     preimage.find_collisions(model, prompts, out="runs/c")
    """

    def __init__(self, address: str = LOCAL, workers: int | None = None, *, device: str = "auto") -> None:
        if workers is not None and workers < 1:
            raise OptionError(f"workers is {workers}.", "Give at least 1.")
        self._address, self._asked, self._device = address, workers, device
        self._members: dict[int, Member] = {}
        self._numbers = 0
        self._joining: dict[Any, Member] = {}
        self._stack = ExitStack()
        self._answered = False  # whether any worker ever has
        self.stats: dict[int, WorkerStats] = {}
        self.lost = 0
        self.count = 0

    @property
    def processes(self) -> dict[int, int]:
        """The ids of the workers' processes, each on its machine, by their numbers."""
        return {number: member.process for number, member in self._members.items()}

    def __enter__(self) -> Self:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self._address == LOCAL:
            wanted = self._asked or by_default(cores)
            opened = started(max(cores, wanted), 0 if self._device == "cpu" else None)
        else:
            opened = joined(self._address)
        self._ray = self._stack.enter_context(opened)
        there = self._ray.cluster_resources()
        gpus = 0 if self._device == "cpu" else int(there.get("GPU", 0))
        self.count = self._asked or (gpus or by_default(int(there.get("CPU", 1))))
        self._share = {
            "num_gpus": 1 if gpus else 0,
            "num_cpus": max(1, int(there.get("CPU", 1)) // self.count),
        }
        import torch

        self._threads = torch.get_num_threads()
        self._stack.enter_context(working_with(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._members.clear()
        self._joining.clear()

    def each(
        self,
        errand: Errand,
        groups: Sequence[Group],
        folder: Place,
        here: Callable[[Group], list[Any]] | None = None,
    ) -> Iterator[tuple[Group, list[Any]]]:
        """Every group as it gets finished; errors of ours come back as what they are."""
        if errand.spec.get("model", {}).get("device") == "cpu":
            here = None  # workers start on the cores that this would take
        schedule: Schedule[Group] = Schedule(groups, workers=self.count)
        self._ask_again()
        digest, told = packed(errand)
        with self._place(folder) as place:
            job = f"{digest} {place['address']} {place['proof']}", [self._ray.put(told)], place
            yield from self._follow(schedule, errand, job, here)
        if schedule.poisoned:
            raise _given_up(schedule.poisoned, len(groups))

    def _follow(
        self,
        schedule: Schedule[Group],
        errand: Errand,
        job: tuple[Any, ...],
        here: Callable[[Group], list[Any]] | None,
    ) -> Iterator[tuple[Group, list[Any]]]:
        """Hand out what waits, take what is done, replace who is lost.

        Until the first worker has ever answered, this process does pieces itself: it has the model, and would
        only wait while they start and load theirs.
        """
        pending: dict[Any, tuple[int, Group]] = {}
        deadline = time.monotonic() + _PATIENCE
        while schedule.open:
            self._staff()
            for number, member in self._members.items():
                while (group := schedule.next(number)) is not None:
                    inputs = errand.inputs(group) if errand.inputs else b""
                    pending[member.actor.run.remote(*job, list(group), inputs)] = number, group
            deadline = time.monotonic() + _PATIENCE if self._members else deadline
            if time.monotonic() > deadline:
                raise _nobody()
            helping = None if self._answered else here
            ready = self._ray.wait([*pending, *self._joining], timeout=0.0 if helping else _TURN)[0]
            if not ready and helping and (own := schedule.take()) is not None:
                yield own, helping(own)
            for ref in ready:
                if ref in self._joining:
                    self._welcome(ref, schedule, errand)
                    continue
                number, group = pending.pop(ref)
                answer = self._answer(ref, number, schedule)
                if answer is None:
                    pending = {one: held for one, held in pending.items() if held[0] != number}
                elif answer.kind == DONE:
                    schedule.finished(number, group)
                    yield group, json.loads(answer.content)
                elif answer.kind == REFUSED:
                    raise error_of(answer.content)
                else:
                    schedule.failed(number, group, answer.content.decode(errors="replace"))
            if schedule.open and schedule.hopeless:
                raise ClusterError(
                    "Workers are lost again and again, and nothing gets finished.",
                    "They may lack memory: give fewer workers, or machines with more.",
                )

    def wait(self) -> None:
        """Wait until all workers are there; without it, work begins with whoever is."""
        nothing: Schedule[Group] = Schedule([])
        self._ask_again()
        self._staff()
        while len(self._members) < self.count:
            self._welcome_some(nothing, Errand("", {}), _PATIENCE)
            if nothing.hopeless:
                raise ClusterError("No worker stays.", "Look at the cluster's log (`ray status`).")
            self._staff()
        self._answered = True  # nobody has to begin for them

    def _ask_again(self) -> None:
        """Have every worker say that it is there: who has died since is missed now, and blames no piece."""
        self._joining |= {member.actor.hello.remote(): member for member in self._members.values()}
        self._members.clear()

    def _welcome_some(self, schedule: Schedule[Group], errand: Errand, seconds: float) -> None:
        """Take in who has come, waiting so long for the first."""
        if self._joining:
            for ref in self._ray.wait(list(self._joining), timeout=seconds)[0]:
                self._welcome(ref, schedule, errand)

    def _staff(self) -> None:
        """Start workers up to their number."""
        while len(self._members) + len(self._joining) < self.count:
            remote = self._ray.remote(
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": _WAITING},
                **self._share,
            )
            member = Member(self._numbers, remote(Actor).remote(self._threads))
            self._numbers += 1
            self._joining[member.actor.hello.remote()] = member

    def _welcome(self, ref: Any, schedule: Schedule[Group], errand: Errand) -> None:
        """A new worker has said who it is, or was lost before that."""
        member = self._joining.pop(ref)
        try:
            said = json.loads(self._ray.get(ref))
        except self._ray.exceptions.RayTaskError as error:  # it is there, and cannot work
            raise ClusterError(
                f"A worker cannot be used: {errors.first_line(error.cause or error)}.",
                "Install preimage and what it needs on every machine of the cluster.",
            ) from error
        except self._ray.exceptions.RayError as error:
            log.debug("a worker did not come: %s", error)
            schedule.lost(member.number, str(error))
            return
        _require_same(said, errand)
        self._members[member.number] = member._replace(process=said["pid"])
        schedule.join(member.number)

    def _answer(self, ref: Any, number: int, schedule: Schedule[Group]) -> Answer | None:
        """What a worker says; None where it is lost, and then it is replaced."""
        try:
            answer = Answer(*self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            self.lost += 1
            log.warning("a worker was lost, and its work goes to another: %s", errors.first_line(error))
            with suppress(Exception):
                self._ray.kill(self._members[number].actor)
            self._members.pop(number, None)
            schedule.lost(number, errors.first_line(error))
            return None
        self._answered = True
        before = self.stats.get(number, WorkerStats(0, 0.0, 0))
        self.stats[number] = WorkerStats(
            before.pieces + 1, before.seconds + answer.seconds, max(before.peak_bytes, answer.peak_bytes)
        )
        return answer

    @contextmanager
    def _place(self, folder: Place) -> Iterator[dict[str, Any]]:
        """How workers find a folder: where it is, what proves that they see it, and another way to it."""
        proof, address = uuid.uuid4().hex, address_of(folder)
        shelf = FolderShelf(folder)
        shelf.put(PROOF, proof.encode())
        here = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=False
        )
        make = self._ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)
        relay = make(Relay).remote(address)
        try:
            yield {"address": address, "proof": proof, "relay": relay}
        finally:
            with suppress(Exception):
                self._ray.kill(relay)
            with suppress(PreimageError):
                remove_all(folder / PROOF)


def by_default(cores: int) -> int:
    """Workers on so many cores, where there is no GPU."""
    return min(cores, max(2, math.ceil(cores / _CORES)))


def _require_same(said: dict[str, Any], errand: Errand) -> None:
    """Refuse a worker on which the same work would be another."""
    ours, theirs = facts(), said["facts"]
    differ = [
        f"{name} {theirs.get(name)}, not {value}" for name, value in ours.items() if theirs.get(name) != value
    ]
    if differ:
        raise ClusterError(
            f"A worker has {'; '.join(differ)}.",
            "Install the same versions everywhere, leave the number of threads alone, and start anew.",
        )
    device = errand.spec.get("model", {}).get("device")
    if device is not None and device != said["device"]:
        raise ClusterError(
            f"The model is on {device}, and a worker has {said['device']}.",
            f"Give --device {said['device']}, or workers with {device}.",
        )


def _nobody() -> ClusterError:
    return ClusterError(
        f"No worker has come for {_PATIENCE:.0f} s.", "Look at the cluster's log (`ray status`)."
    )


def _given_up(poisoned: dict[Group, str], total: int) -> ClusterError:
    named = "; ".join(
        f"{', '.join(group)[:60]}: {reason[:200]}" for group, reason in list(poisoned.items())[:3]
    )
    return ClusterError(
        f"{len(poisoned)} of {total} pieces ended every worker that tried them ({named}).",
        "All others are kept; rerun the command to try these again, with more memory for each worker.",
    )
