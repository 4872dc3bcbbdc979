"""How much capturing all layers costs beside the forward pass it rides on."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

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
    limits: dict[str, Any] = {"vocab_size": model.vocab_size, "max_length": model.max_length}
    options = PromptOptions(count=count, length=length)
    prompts = gather("random", model.tokenizer, options, **limits)
    size = max(1, (batch_tokens or 1) // length)
    rows = torch.tensor(list(prompts), device=model.device)

    def plain() -> None:
        with torch.inference_mode():
            for batch in rows.split(size):
                model.anatomy.backbone(batch, use_cache=False)

    def ours() -> None:
        capture(model, prompts, "all", batch_tokens=batch_tokens or 1)

    for side in (plain, ours):
        side()  # warm-up; the noise floor and the weight hash are measured once, here
    pairs = []
    for index in range(rounds):
        sides = (plain, ours) if index % 2 == 0 else (ours, plain)  # neither side always runs second
        seconds = {side: _seconds(side, model.device) for side in sides}
        pairs.append((seconds[plain], seconds[ours]))
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


def hardware(model: LanguageModel) -> dict[str, Any]:
    """What a speed was measured on."""
    cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _seconds(side: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    side()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
