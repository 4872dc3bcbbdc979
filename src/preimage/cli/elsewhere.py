"""Options of work on a cluster, and plans of work: what several commands have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from preimage.cli.terminal import print_lines, print_result, print_table
from preimage.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    from preimage.planning import WorkPlan

ClusterAddress = Annotated[
    str | None, typer.Option("--cluster", help="Work on a Ray cluster: local, or HOST:PORT of its head.")
]
WorkerCount = Annotated[
    int | None, typer.Option("--workers", help="Workers of --cluster; default: one a GPU, or for 4 cores.")
]
OnlyPlan = Annotated[
    bool, typer.Option("--plan", help="Say what the work would cost, from a quick calibration; do nothing.")
]
_MARK = time.perf_counter()  # when this process was about to begin


def check_cluster(cluster: str | None, workers: int | None, *, plan: bool = False) -> None:
    """Refuse what cannot be a cluster, before anything is loaded."""
    if workers is not None and workers < 1:
        raise OptionError(f"--workers is {workers}.", "Give at least 1.")
    if cluster is None:
        if workers is not None and not plan:
            raise OptionError("--workers goes with --cluster.", "Give --cluster local, or leave it out.")
        return
    from preimage.cluster.joining import LOCAL, parse_address

    if cluster != LOCAL:
        parse_address(cluster)
    if find_spec("ray") is None:
        raise MissingExtraError("A cluster needs Ray.", "pip install 'preimage[ray]'")


@contextmanager
def working_on(cluster: str | None, workers: int | None, device: str) -> Iterator[None]:
    """Everything inside is done by the workers of a cluster, where one was asked for."""
    if cluster is None:
        yield
        return
    from preimage.cluster import Cluster

    with Cluster(cluster, workers, device="cpu" if device == "cpu" else "auto"):
        yield


def load_seconds() -> float:
    """How long it took from the start of the command until now, when the model is there."""
    return time.perf_counter() - _MARK


def planned_workers(workers: int | None) -> int:
    """How many workers a plan is for where nobody said: as many as a local cluster would have."""
    from preimage.cluster.engine import by_default

    return workers or by_default(os.cpu_count() or 1)


def show_plan(plan: WorkPlan, json: bool) -> None:
    """The plan, in a table or as json."""
    if json:
        print_result(plan.command, {"plan": plan.to_dict()})
        return
    rows = [[stage.name, f"{stage.pieces:,}", span(stage.on(1, 1.0))] for stage in plan.stages]
    print_table(f"preimage {plan.command} would be", ["stage", "pieces", "in one process"], rows)
    memory, disk = (size / 2**30 for size in (plan.memory_bytes, plan.disk_bytes))
    print_lines(
        "",
        f"{plan.forward_tokens:,} forward tokens, {plan.pairs:,} pairs",
        f"memory of a worker: at most {memory:.1f} GiB; disk: at most {disk:.2f} GiB",
        f"in one process: {span(plan.seconds)}",
        f"--cluster local --workers {plan.workers}: {span(plan.seconds_here)}",
        "on workers with a machine like this one each: "
        + ", ".join(f"{count}: {span(seconds)}" for count, seconds in plan.seconds_on.items()),
        "Nothing was run.",
    )


def span(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
