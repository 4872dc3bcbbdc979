"""``preimage demo``."""

from __future__ import annotations

import time

from preimage.cli import DONE, NOT_RECOVERED
from preimage.cli.arguments import Json
from preimage.cli.terminal import print_json, print_lines, print_table, progress_bar
from preimage.schema import SCHEMA

_PROMPTS = (
    "My password is hunter2.",
    "The patient was born in Lyon.",
    "def add(a, b): return",
)


def demo(json: Json = False) -> int:
    """Recover prompts from the hidden states of a real model, and show them beside the originals."""
    import preimage

    started = time.perf_counter()
    model = preimage.load("smollm2")
    layer = model.n_layers // 2
    states = preimage.capture(model, list(_PROMPTS), layers=[layer])
    if not json:
        print_lines(
            f"{model.name}: {model.n_layers} blocks, d_model {model.d_model}, vocabulary {model.vocab_size}.",
            f"Only the states at layer {layer} are given to the inverter: {len(states)} prompts, "
            f"{sum(states.lengths)} tokens. This takes a minute or two.",
        )
    with progress_bar() as progress:
        found = preimage.invert(model, states, layer=layer, progress=progress)
    assert states.token_ids is not None
    exact = [r.token_ids == ids for r, ids in zip(found, states.token_ids, strict=True)]
    if json:
        results = [
            {"original": p, "exact": e, **r.to_dict()} for p, e, r in zip(_PROMPTS, exact, found, strict=True)
        ]
        print_json(
            {
                "schema": SCHEMA,
                "command": "demo",
                "model": model.identity.to_dict(),
                "results": results,
            }
        )
    else:
        rows = [
            [prompt, result.text or "", "exact" if same else result.status, f"{result.tests / len(ids):.0f}",
             f"{result.seconds:.1f} s"]
            for prompt, result, same, ids in zip(_PROMPTS, found, exact, states.token_ids, strict=True)
        ]  # fmt: skip
        print_table(
            f"Layer {layer} of {model.n_layers}",
            ["original", "recovered", "token ids", "tests a token", "time"],
            rows,
        )
        print_lines(f"{sum(exact)} of {len(exact)} exact, {time.perf_counter() - started:.0f} s in all.")
    return DONE if all(exact) else NOT_RECOVERED
