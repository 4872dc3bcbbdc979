"""How much capturing all layers costs beside the forward pass it rides on."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from preimage.bench.timing import hardware, plain_forward, take_turns
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
    prompts = gather("random", model, PromptOptions(count=count, length=length))
    size = max(1, (batch_tokens or 1) // length)
    plain = partial(plain_forward, model, prompts.ids, size)
    ours = partial(capture, model, prompts, "all", batch_tokens=batch_tokens or 1)
    # the noise floor and the weight hash are measured once, as both warm up
    pairs = take_turns((plain, ours), rounds, model.device, progress)
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
        "hardware": hardware(model.device),
    }
