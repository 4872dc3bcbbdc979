"""What the exact co-Lipschitz constant costs beside the margin alone."""

from __future__ import annotations

import statistics
from typing import Any

from jaxtyping import Float
from torch import Tensor

from preimage.bench.timing import hardware, seconds, take_turns
from preimage.distances import PairScan
from preimage.distances.prompt_distances import PromptDistances
from preimage.errors import OptionError
from preimage.geometry.ratios import measure_ratios
from preimage.layers import LayerSpec
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, gather
from preimage.states import capture


def bench_geometry(
    model: LanguageModel,
    layers: LayerSpec = "all",
    *,
    source: str = "default",
    count: int = 2000,
    length: int = 32,
    rounds: int = 5,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Median over rounds of (seconds of the ratios of all pairs) / (seconds of the margin), turn by turn.

    Both start from the captured states of a layer and look at all pairs: the margin is every prompt's
    certified nearest distance, the ratios are every prompt's smallest D/d, its margin and its second nearest
    state. The prompts' ids are made ready once for all layers (``prompt_seconds``). ``worst`` is the largest
    ratio of a layer.
    """
    if count < 2 or length < 1 or rounds < 1:
        raise OptionError(
            f"count = {count}, length = {length}, rounds = {rounds}.", "Give count >= 2, others >= 1."
        )
    prompts = gather(source, model, PromptOptions(count=count, length=length, seed=seed))
    states = capture(model, prompts, layers, positions="last", batch_tokens=4096, progress=progress)
    prepared: list[PromptDistances] = []
    ready = seconds(lambda: prepared.append(PromptDistances(prompts.ids, model.device)), model.device)
    measured: dict[str, dict[str, float]] = {}
    for number, layer in enumerate(states.layers):
        measured[str(layer)] = _timed(states.last(layer).to(model.device), prepared[0], rounds)
        progress(number + 1, len(states.layers), "layers timed")
    every = [row["ratio"] for row in measured.values()]
    return {
        "colipschitz_over_margin": statistics.median(every),
        "worst": max(every),
        "layers": measured,
        "prompt_seconds": ready,
        "source": source,
        "prompts": count,
        "length": length,
        "rounds": rounds,
        "model": model.identity.to_dict(),
        "hardware": hardware(model.device),
    }


def _timed(x: Float[Tensor, "row d"], prompts: PromptDistances, rounds: int) -> dict[str, float]:
    """Both sides on one layer, turn by turn."""

    def margin() -> None:
        PairScan(x).nearest  # noqa: B018  # computed when asked for

    def ratios() -> None:
        measure_ratios(PairScan(x), prompts)

    pairs = take_turns((margin, ratios), rounds, x.device)
    return {
        "ratio": statistics.median(full / alone for alone, full in pairs),
        "margin_seconds": statistics.median(alone for alone, _ in pairs),
        "colipschitz_seconds": statistics.median(full for _, full in pairs),
    }
