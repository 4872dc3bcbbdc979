"""The geometry of one model at several prompt lengths, 20,000 prompts each; one json document into a file.

    python docs/results/geometry.py OUT.json [--model smollm2] [--count 20000] [--lengths 8,16,32,64,128]

At every length the same mixture: windows of the default corpus, prose and code, and uniformly random tokens.
At 32 tokens also with a step for each channel, and with quantised states carried on through the network.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

import preimage
from preimage.bench import bench_geometry
from preimage.bench.timing import hardware
from preimage.geometry import GeometryOptions, Quantiser, measure_model
from preimage.prompts import PromptOptions, PromptSet, gather
from preimage.storage import dumps

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--name", default="smollm2")
parser.add_argument("--count", type=int, default=20_000)
parser.add_argument("--lengths", default="8,16,32,64,128")
parser.add_argument("--layers", default="all")
given = parser.parse_args()
SHARES = {"default:prose:test": 0.0175, "default:prose:train": 0.0175, "default:code:test": 0.13,
          "default:code:train": 0.5, "random": 0.335}  # fmt: skip


def prompts(length: int) -> PromptSet:
    """The mixture at one length."""
    found: dict[tuple[int, ...], None] = {}
    counts = {source: round(share * given.count) for source, share in SHARES.items()}
    for source, count in counts.items():
        missing = count if source != "random" else given.count - len(found)
        options = PromptOptions(count=missing, length=length)
        found.update(dict.fromkeys(gather(source, model, options)))
    return PromptSet(tuple(found), "mixture", 0, 0)


def write() -> None:
    """What is known so far."""
    document = {
        "command": "python docs/results/geometry.py",
        "shares": SHARES,
        "model": model.identity.to_dict(),
        "hardware": hardware(model.device),
        "memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "seconds": took | {"all": time.perf_counter() - started},
        "bench": bench,
        "runs": runs,
    }
    given.out.write_text(dumps(document))


started = time.perf_counter()
model = preimage.load(given.model)
model.name = given.name
options = GeometryOptions()
runs: dict[str, object] = {}
took: dict[str, float] = {"load": time.perf_counter() - started}
bench = bench_geometry(model, "1,15,30,final", source="random", count=given.count, rounds=3)
for length in map(int, given.lengths.split(",")):
    clock = time.perf_counter()
    ids = prompts(length)
    took[f"{length}-prompts"] = time.perf_counter() - clock
    variants = {"layer": options}
    if length == 32:
        variants["channel"] = replace(options, quantiser=Quantiser(granularity="channel"), subsets=0)
        variants["propagated"] = replace(options, propagate=True, subsets=0)
    for name, variant in variants.items():
        clock = time.perf_counter()
        found = measure_model(model, ids, given.layers, options=variant)
        key = f"{length}-{name}"
        runs[key], took[key] = found.to_dict(), time.perf_counter() - clock
        print(took, flush=True)  # noqa: T201  # a script
        write()
