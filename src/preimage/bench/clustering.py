"""A cluster against one process: the same collision search, the same cores, in one run."""

from __future__ import annotations

import time
from typing import Any

from preimage.bench.timing import hardware
from preimage.cluster import Cluster
from preimage.collisions import CollisionOptions, find_collisions
from preimage.layers import LayerSpec, parse_layers
from preimage.models import LanguageModel
from preimage.planning import plan_collisions
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, PromptSet, gather
from preimage.states import noise_floor


def bench_cluster(
    model: LanguageModel,
    *,
    count: int = 2000,
    length: int = 32,
    source: str | PromptSet = "default",
    layers: LayerSpec = "all",
    workers: int = 2,
    alone: bool = True,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Seconds of a collision search in one process and on a local cluster, its start and end included.

    ``overhead``: what the cluster takes more, as a share of the one process's time. ``plan``: what ``--plan``
    says of both, and of a worker's memory, beside what was. ``cluster_stage_seconds``: how long the cluster
    was at what progress calls its stages. The model is loaded and the noise floor known
    before: neither is part of it. ``alone``: without it the search in one process is left out.
    """
    wanted = parse_layers(layers, model.n_layers)
    given = source if isinstance(source, PromptSet) else None
    watch = _Watch(progress)
    ids = given or gather(str(source), model, PromptOptions(count=count, length=length))
    noise_floor(model, wanted)
    plan = plan_collisions(model, ids.lengths, wanted, workers=workers)
    options = CollisionOptions()

    def search() -> tuple[dict[str, Any], float]:
        began = time.perf_counter()
        result = find_collisions(model, ids, wanted, options=options, progress=watch)
        watch.end()
        return result.to_dict(), time.perf_counter() - began

    one, one_seconds = search() if alone else (None, None)
    watch.seconds.clear()
    began = time.perf_counter()
    with Cluster("local", workers, device=model.device.type) as cluster:
        two, work_seconds = search()
    cluster_seconds = time.perf_counter() - began
    peak = max((stats.peak_bytes for stats in cluster.stats.values()), default=0)
    overhead = None if one_seconds is None else cluster_seconds / one_seconds - 1
    return {
        "model": model.identity.to_dict(),
        "prompts": len(ids),
        "layers": list(wanted),
        "workers": workers,
        "hardware": hardware(model.device),
        "one_process_seconds": one_seconds,
        "cluster_seconds": cluster_seconds,
        "cluster_work_seconds": work_seconds,
        "cluster_stage_seconds": watch.seconds,
        "overhead": overhead,
        "same_bytes": None if one is None else one == two,
        "worker_peak_bytes": peak,
        "worker_pieces": sum(stats.pieces for stats in cluster.stats.values()),
        "plan": {
            "one_process_seconds": plan.seconds,
            "cluster_seconds": plan.seconds_here,
            "worker_bytes": plan.memory_bytes,
            "forward_tokens": plan.forward_tokens,
            "pairs": plan.pairs,
            "stages": [stage.__dict__ for stage in plan.stages],
            "calibration": plan.calibration,
        },
    }


class _Watch:
    """Progress that is passed on, and the seconds between one word of it and the next, by word."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._note, self._since = progress, "", time.perf_counter()
        self.seconds: dict[str, float] = {}

    def __call__(self, done: int, total: int, note: str) -> None:
        if note != self._note:
            self.end()
            self._note = note
        self._progress(done, total, note)

    def end(self) -> None:
        """The stage that was under way is over."""
        now = time.perf_counter()
        if self._note:
            self.seconds[self._note] = self.seconds.get(self._note, 0.0) + now - self._since
        self._note, self._since = "", now
