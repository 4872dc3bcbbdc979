"""How much capturing all layers costs beside the forward pass it rides on."""

from __future__ import annotations

import statistics
from typing import Any

from preimage.bench.timing import hardware, plain_forward, seconds
from preimage.errors import OptionError
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, gather
from preimage.states import capture


def bench_capture(
    model: LanguageModel,
    *,
    count: int = 16,
    length: int = 64,
    rounds: int = 5,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Median over rounds of (plain forward seconds) / (capture seconds), sides alternating.

    The plain side calls the model's own backbone (all blocks, no LM head, nothing kept) on the same prompts
    in the same batches.
    """
    if min(count, length, rounds) < 1:
        raise OptionError("count, length and rounds must be at least 1.", "Give larger numbers.")
    options = PromptOptions(count=count, length=length)
    prompts = gather("random", model, options)
    size = max(1, (batch_tokens or 1) // length)
    rows = list(prompts)

    def plain() -> None:
        for start in range(0, len(rows), size):
            plain_forward(model, rows[start : start + size])

    def ours() -> None:
        capture(model, prompts, "all", batch_tokens=batch_tokens or 1)

    for side in (plain, ours):
        side()  # warm-up; the noise floor and the weight hash are measured once, here
    pairs = []
    for index in range(rounds):
        sides = (plain, ours) if index % 2 == 0 else (ours, plain)  # neither side always runs second
        took = {side: seconds(side, model.device) for side in sides}
        pairs.append((took[plain], took[ours]))
        progress(index + 1, rounds, "rounds")
    return {
        "fraction_of_forward": statistics.median(p / o for p, o in pairs),
        "forward_seconds": statistics.median(p for p, _ in pairs),
        "capture_seconds": statistics.median(o for _, o in pairs),
        "rounds": [list(pair) for pair in pairs],
        "tokens": count * length,
        "prompts": count,
        "length": length,
        "batch_prompts": size,
        "layers": model.n_layers + 2,
        "model": model.identity.to_dict(),
        "hardware": hardware(model),
    }
