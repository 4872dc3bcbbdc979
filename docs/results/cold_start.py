"""A model nobody prepared: seconds from loaded to the first and to the second recovered prompt.

    python docs/results/cold_start.py OUT.jsonl [--model gemma] [--layers 1 9 18] [--device cuda]

A Gemma 3 configuration with 6,000 unused tokens whose embeddings are nearly the same, the shape of Llama 3.1
8B in bfloat16, both with random weights, or the default model with its lenses. Every layer in a process of
its own, with an empty cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NEARLY = 6000


def gemma(device: str) -> Any:
    """262,144 tokens, width 640, 18 blocks; 6,000 tokens are nearly the same."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
    )  # fmt: skip
    module = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        table = module.get_input_embeddings().weight
        near = 1e-4 * table[100].std() * torch.randn(NEARLY, config.hidden_size)
        table[6 : 6 + NEARLY] = table[100].clone() + near
    return module.to(device)


def llama(device: str, width: int = 4096, blocks: int = 32) -> Any:
    """The shape of Llama 3.1 8B in bfloat16: 128,256 tokens, width 4,096, 32 blocks."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=blocks,
        num_attention_heads=width // 128, num_key_value_heads=max(1, width // 512), rope_theta=500_000.0,
        max_position_embeddings=131_072, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


# what is built, how many tokens a prompt has, and the range these are drawn from
MODELS = {
    "gemma": (gemma, 64, (10_000, 260_000)),
    "llama": (llama, 20, (0, 128_000)),
    "smollm2": (None, 64, (0, 49_152)),
    "small-llama": (lambda device: llama(device, 512, 8), 20, (0, 128_000)),
}


def measure(name: str, layer: int, device: str) -> dict[str, object]:
    """Two prompts at one layer, one after the other."""
    import torch

    import preimage
    from preimage.bench.timing import hardware

    build, length, drawn_from = MODELS[name]
    torch.manual_seed(0)
    model = preimage.load(name, device=device) if build is None else preimage.load(build(device))
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(2):
        ids = [2, *torch.randint(*drawn_from, (length - 1,), generator=generator).tolist()]
        states = model.states(torch.tensor([ids]), (layer,))[layer][0].cpu()
        began = time.perf_counter()
        (found,) = preimage.invert(model, states, layer)
        rows.append({
            "seconds": round(time.perf_counter() - began, 2), "setup": round(found.setup_seconds, 2),
            "status": found.status, "exact": found.claims(ids), "proposer": found.proposer,
            "tests": found.tests,
        })  # fmt: skip
    return {"model": name, "layer": layer, "prompts": rows, "hardware": hardware(model.device)}


def main() -> None:
    """Measure the layers that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--model", choices=[*MODELS], default="gemma")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 9, 18])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="", help="where this is not run in its repository")
    parser.add_argument("--here", action="store_true", help="in this process, whatever its cache holds")
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    for layer in given.layers:
        if given.here:
            found = measure(given.model, layer, given.device) | {
                "commit": given.commit or commit.stdout.strip()
            }
            with Path(given.out).open("a") as file:
                file.write(json.dumps(found) + "\n")
            continue
        again = [sys.executable, __file__, given.out, "--here", "--layers", str(layer)]
        again += ["--model", given.model, "--device", given.device, "--commit", given.commit]
        with tempfile.TemporaryDirectory() as cache:
            subprocess.run(again, check=True, env=os.environ | {"PREIMAGE_CACHE": cache})


if __name__ == "__main__":
    main()
