"""GPT-2 and Llama from scratch on the same text, three sizes each; one json document into a file.

    python docs/results/families.py OUT.json [--sizes small,medium,large] [--seeds 0,1,2] [--steps 1000]

Every run is measured on the same probes at log-spaced steps. What is done is written after every run.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import torch

from preimage.bench.timing import hardware
from preimage.models.loading import parse_device
from preimage.storage import dumps
from preimage.training import TrajectoryOptions, train_trajectory

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--families", default="gpt2,llama")
parser.add_argument("--sizes", default="small,medium,large")
parser.add_argument("--seeds", default="0,1,2")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--probes", type=int, default=2000)
parser.add_argument("--checkpoints", type=int, default=10)
given = parser.parse_args()

started = time.perf_counter()
device = parse_device("auto")
runs: dict[str, object] = {}
took: dict[str, float] = {}
for seed, size, family in product(given.seeds.split(","), given.sizes.split(","), given.families.split(",")):
    clock = time.perf_counter()
    options = TrajectoryOptions(
        family=family, size=size, seed=int(seed), steps=given.steps, batch=given.batch,
        probes=given.probes, checkpoints=given.checkpoints, tf32=True,
    )  # fmt: skip
    found = train_trajectory(options, device=device)
    name = f"{family}-{size}-{seed}"
    runs[name], took[name] = found.to_dict(), time.perf_counter() - clock
    last = found.checkpoints[-1]
    print(name, round(took[name], 1), round(last.held_out_loss, 3), flush=True)  # noqa: T201  # a script
    document = {
        "command": "python docs/results/families.py",
        "hardware": hardware(device),
        "memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "seconds": took | {"all": time.perf_counter() - started},
        "runs": runs,
    }
    given.out.write_text(dumps(document))
