"""Inversion of text of many kinds: what a lens names, what it costs, and how fast many prompts go together.

    python docs/results/any_text.py ranks PROMPTS.json OUT.json
    python docs/results/any_text.py alone PROMPTS.json OUT.json --kind prose --layers 15 22 29 30 final
    python docs/results/any_text.py together PROMPTS.json OUT.json --device cuda --layers 15 24 27 30 final
    python docs/results/any_text.py long PROMPTS.json OUT.json --device cuda --layers 15
    python docs/results/any_text.py train PROMPTS.json OUT.json --device cuda --layers final

PROMPTS.json comes from texts.py. ``ranks``: the shipped lenses, by kind of text. ``alone``: one prompt after
another, beside plain passes over the same prompt. ``together``: 1,000 prompts in one call, a third each of
prose, code and random tokens, beside plain passes. ``long``: one prompt of 4,096 tokens of a kind. ``train``:
how long ``preimage lens train`` takes, with loading the model and its defaults, and what the lens names;
with ``--minutes``, of what it has learned by then. A training beside OUT.safetensors is continued.
``ranks --lens FILE``: of that lens instead.
"""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import preimage
from preimage.bench.inverting import bench_inversion, bench_throughput
from preimage.bench.timing import hardware
from preimage.layers import parse_layers


def ranks(
    model: Any, prompts: dict[str, list[list[int]]], count: int, lens_file: Path | None = None
) -> dict[str, Any]:
    """Shares of tokens that each shipped lens names first, within 8 and within 64, by kind of text."""
    from preimage.inversion.proposers.lens_files import known_lenses, read_info, read_weights
    from preimage.training.lenses import held_out_ranks, summarise

    texts = {kind: rows[:count] for kind, rows in prompts.items()}
    for kind in ("prose", "code"):  # of the default corpus, its test split
        options = preimage.PromptOptions(count=24, length=64, seed=5)
        texts[f"default {kind}"] = [list(row) for row in preimage.gather(f"default:{kind}", model, options)]
    table: dict[str, Any] = {}
    for info in known_lenses() if lens_file is None else [read_info(lens_file)]:
        lens = read_weights(info).to(model.device)
        table[str(info.layer)] = {
            kind: summarise(held_out_ranks(model, info.tap, lens, torch.tensor(rows)))
            | {"prompts": len(rows)}
            for kind, rows in texts.items()
        }
        print(info.layer, {kind: round(row["rank0"], 4) for kind, row in table[str(info.layer)].items()})  # noqa: T201
    return {"lenses": table, "hardware": hardware(model.device)}


def third_each(prompts: dict[str, list[list[int]]]) -> list[list[int]]:
    """1,000 prompts, a third each of prose, code and random tokens."""
    return prompts["prose"][:334] + prompts["code"][:333] + prompts["random"][:333]


def train(
    model: Any, layer: str, out: Path, began: float, steps: int, minutes: float | None
) -> dict[str, Any]:
    """Train a lens as ``preimage lens train`` does; its time, and what it names of held-out text."""
    from preimage.training import LensOptions, train_lens
    from preimage.training.trainer import Trainer

    original, made = Trainer.advance, 0

    def advance(self: Trainer, to: int, *progress: Any) -> None:
        nonlocal made
        while self.step < to and (minutes is None or time.perf_counter() - began < 60 * minutes):
            original(self, to if minutes is None else self.step + 1, *progress)
        made = self.step

    Trainer.advance = advance  # type: ignore[method-assign]
    (at,) = parse_layers(layer, model.n_layers)
    trained = train_lens(model, at, options=LensOptions(steps=steps), out=out)
    return {"seconds": time.perf_counter() - began, "steps": made, "held_out": trained.held_out}


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["ranks", "alone", "together", "long", "train"])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", default="prose")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--layers", nargs="+", default=["15"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="where this is not run in its repository")
    parser.add_argument("--steps", type=int, default=1200, help="of train")
    parser.add_argument("--minutes", type=float, help="of train: stop then")
    parser.add_argument("--lens", type=Path, help="of ranks: a lens file, instead of those shipped")
    given = parser.parse_args()
    began = time.perf_counter()
    model = preimage.load("smollm2", device=given.device)
    prompts = json.loads(given.prompts.read_text())
    layers = ",".join(given.layers)
    if given.what == "ranks":
        found = ranks(model, prompts, given.count, given.lens)
    elif given.what == "train":
        lens = given.out.with_suffix(".safetensors")
        found = train(model, layers, lens, began, given.steps, given.minutes)
        found |= ranks(model, prompts, given.count, lens)
        print(found["seconds"], found["held_out"], flush=True)  # noqa: T201
    elif given.what == "long":
        whole = [token for row in prompts[given.kind] for token in row][:4096]
        found = bench_inversion(model, layers, prompts=[whole] * 3) | {"kind": given.kind}
    elif given.what == "alone":
        found = bench_inversion(model, layers, prompts=prompts[given.kind][: given.count])
        found["kind"] = given.kind
    else:
        found = bench_throughput(model, layers, prompts=third_each(prompts))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found["commit"] = given.commit or commit.stdout.strip()
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    for layer, row in found.get("layers", {}).items():
        short = {name: value for name, value in row.items() if name != "rows"}
        print(layer, short, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
