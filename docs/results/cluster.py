"""A collision search on a local Ray cluster against one process; one json document into a file.

    python docs/results/cluster.py OUT.json [--model smollm2] [--count 100000] [--workers 1]
    python docs/results/cluster.py OUT.json --workers 2 --layers 0-3 --grow 2000,8000,32000

The second measures the cluster alone, at one number of prompts after another.

The prompts are those of collisions.py: all of the default corpus's windows of 32 tokens (prose and code), and
uniformly random tokens for the rest. The same is `preimage bench cluster` for prompts of one source.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import preimage
from preimage.bench import bench_cluster
from preimage.prompts import PromptOptions, PromptSet, Vocabulary, gather
from preimage.storage import record

SOURCES = ("default:prose:test", "default:prose:train", "default:code:test", "default:code:train")


def mixed(model: preimage.LanguageModel, count: int, length: int) -> PromptSet:
    """Windows of text, and random tokens where they are too few."""
    ids: dict[tuple[int, ...], None] = {}
    for source in SOURCES:
        found = gather(source, model, PromptOptions(length=length))
        ids.update(dict.fromkeys(found.ids[: count - len(ids)]))
    if missing := count - len(ids):
        options = PromptOptions(count=missing, length=length)
        vocabulary = Vocabulary(None, model.vocab_size, model.max_length)
        ids.update(dict.fromkeys(gather("random", vocabulary, options)))
    return PromptSet(tuple(ids), "default and random", 0, 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--layers", default="all")
    parser.add_argument("--grow", default="", help="numbers of prompts, separated by commas")
    given = parser.parse_args()
    loaded = preimage.load(given.model)

    def measure(count: int, *, alone: bool) -> dict[str, Any]:
        """One search, of so many prompts."""
        prompts = mixed(loaded, count, given.length)
        return bench_cluster(loaded, source=prompts, layers=given.layers, workers=given.workers, alone=alone)

    if given.grow:
        result = {"runs": [measure(int(count), alone=False) for count in given.grow.split(",")]}
    else:
        result = measure(given.count, alone=True)
    given.out.write_text(json.dumps({"record": record()} | result, indent=1))
