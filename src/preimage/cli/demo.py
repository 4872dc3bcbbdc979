"""``preimage demo``."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from preimage.cli import DONE, FINDINGS
from preimage.cli import arguments as arg
from preimage.cli.terminal import print_lines, print_result, print_table, progress_bar

if TYPE_CHECKING:
    from preimage.models import LanguageModel

_PROMPTS = (
    "My password is hunter2.",
    "The patient, Mrs Duval of 4 rue des Lilas in Lyon, was admitted on 3 March with chest pain and a fever; "
    "her brother, who is a nurse, asked that nobody else be told about the result of the second blood test.",
    "def read(path):\n    with open(path, 'rb') as file:\n        return json.load(file)['api_key']",
)


def demo(model: arg.Model = "smollm2", device: arg.Device = "auto", json: arg.Json = False) -> int:
    """Recover prompts from the hidden states of a real model, and show them beside the originals."""
    import preimage

    started = time.perf_counter()
    loaded, (prompts,) = arg.prepare(model, arg.PromptChoice(list(_PROMPTS), None), device=device)
    layer = loaded.n_layers // 2
    states = preimage.capture(loaded, prompts, layers=[layer])
    if not json:
        print_lines(
            f"{loaded.name} on {loaded.device}: {loaded.n_layers} blocks, d_model {loaded.d_model}, "
            f"vocabulary {loaded.vocab_size}.",
            f"The inverter is given the states at layer {layer} and nothing else: {len(states)} prompts, "
            f"{sum(states.lengths)} tokens.",
        )
    with progress_bar() as progress:
        results = preimage.invert(loaded, states, layer=layer, progress=progress)
    rows: list[dict[str, Any]] = []
    for text, ids, result in zip(_PROMPTS, states.token_ids or (), results, strict=True):
        exact = result.status == "recovered" and result.token_ids == ids
        truth = {"original": text, "exact": exact}
        rows.append(truth | {"ratio_to_forward": _ratio(loaded, ids, result.seconds)} | result.to_dict())
    right = sum(row["exact"] for row in rows)
    if json:
        print_result("demo", {"model": loaded.identity.to_dict(), "results": rows})
    else:
        print_table(
            f"Layer {layer} of {loaded.n_layers}",
            ["original", "recovered", "token ids", "time", "forward passes"],
            [
                [row["original"], row["text"] or "", "exact" if row["exact"] else row["status"],
                 f"{row['seconds']:.2f} s", f"{row['ratio_to_forward']:.1f}"]
                for row in rows
            ],
            prose=["original", "recovered"],
        )  # fmt: skip
        took = time.perf_counter() - started
        print_lines(
            "",
            f"{right} of {len(rows)} recovered, token for token. The last column: the cost in plain forward "
            f"passes over the same prompt. {took:.0f} s in all, most of it loading.",
        )
    return DONE if right == len(rows) else FINDINGS


def _ratio(model: LanguageModel, ids: tuple[int, ...], seconds: float) -> float:
    """Seconds as a multiple of a plain forward pass over the prompt."""
    from preimage.bench.timing import plain_forward
    from preimage.bench.timing import seconds as clock

    forward = partial(plain_forward, model, [ids])
    return seconds / statistics.median(clock(forward, model.device) for _ in range(3))
