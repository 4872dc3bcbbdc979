"""100,000 prompts at every layer and the continuations of the ten closest; one json document into a file.

    python docs/results/collisions.py OUT.json [--model smollm2] [--count 100000] [--prefixes 10]

All of the default corpus's windows of 32 tokens (prose and code), filled up with uniformly random tokens.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import preimage
from preimage.bench.timing import hardware
from preimage.collisions import closest_prompts
from preimage.prompts import PromptOptions, Vocabulary, gather

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--name", default="smollm2")
parser.add_argument("--count", type=int, default=100_000)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--prefixes", type=int, default=10)
given = parser.parse_args()

clock = time.perf_counter()
seconds: dict[str, float] = {}


def lap(what: str) -> None:
    """Note the seconds since the last lap."""
    global clock
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    now = time.perf_counter()
    seconds[what], clock = now - clock, now
    print(what, round(seconds[what], 1), flush=True)  # noqa: T201  # a script


model = preimage.load(given.model)
model.name = given.name
lap("load")
sources = ("default:prose:test", "default:prose:train", "default:code:test", "default:code:train")
prompts: dict[tuple[int, ...], None] = {}
for source in sources:
    found = gather(source, model, PromptOptions(length=given.length))
    prompts.update(dict.fromkeys(found.ids[: given.count - len(prompts)]))
text = len(prompts)
if missing := given.count - text:
    options = PromptOptions(count=missing, length=given.length)
    prompts.update(
        dict.fromkeys(gather("random", Vocabulary(None, model.vocab_size, model.max_length), options))
    )
lap("prompts")
audit = preimage.find_collisions(model, list(prompts))
lap("collisions")
scan = preimage.scan_continuations(model, closest_prompts(audit, count=given.prefixes))
lap("continuations")
document = {
    "prompts": {"text": text, "random": missing, "length": given.length},
    "seconds": seconds | {"total": sum(seconds.values())},
    "hardware": hardware(model.device),
    "collisions": audit.to_dict(),
    "continuations": scan.to_dict(),
}
given.out.write_text(json.dumps(document, indent=1))
