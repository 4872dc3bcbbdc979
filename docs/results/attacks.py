"""Attacks on the default model's inversion: states that no prompt made must never be `recovered`.

    python docs/results/attacks.py MODEL OUT.json [--device cuda] [--count 40]

First positions of layer 15 are attention sinks: 20,000 long, other tokens 60 to 80 away. Stored in bfloat16
they were once mistaken for one another. Tried here: averages of eight unrelated tokens, midpoints of two,
another layer's states, and honest ones, each as a bfloat16 copy; the same by a model that computes in
bfloat16; and noise of one per cent with a tolerance as wide.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

import preimage
from preimage.bench.timing import hardware
from preimage.models import LanguageModel

LAYER = 15


def first_states(model: LanguageModel, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """The state of every token at the first position."""
    parts = [model.states(part[:, None], (layer,))[layer][:, 0] for part in tokens.split(4096)]
    return torch.cat(parts).cpu()


def tally(model: LanguageModel, states: torch.Tensor, truth: list[int] | None, **options: object) -> dict:
    """Statuses of inversions, and what was wrong with them."""
    statuses: Counter[str] = Counter()
    wrong, unlisted, unique, began = 0, 0, Counter(), time.perf_counter()
    for index in range(len(states)):
        (found,) = preimage.invert(model, states[index : index + 1], LAYER, **options)
        statuses[found.status] += 1
        unique[str(found.unique)] += 1
        if truth is None:
            wrong += found.status == "recovered"
        else:
            ids = (truth[index],)
            wrong += found.status == "recovered" and found.token_ids != ids
            unlisted += found.status == "ambiguous" and found.complete and ids not in found.alternatives
    return {
        "statuses": dict(statuses), "unique": dict(unique), "wrong": wrong, "unlisted": unlisted,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def attack(model: LanguageModel, count: int, seed: int, **options: object) -> dict:
    """Every attack on first positions, as bfloat16 copies."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(model.vocab_size, (count, 8), generator=generator)
    states = first_states(model, LAYER, draw.flatten()).view(count, 8, -1).float()
    below = first_states(model, LAYER - 1, draw[:, 0])
    half = torch.bfloat16
    return {
        "mean of 8": tally(model, states.mean(1)[:, None].to(half), None, **options),
        "midpoint": tally(model, states[:, :2].mean(1)[:, None].to(half), None, **options),
        "layer 14 as 15": tally(model, below[:, None].to(half), None, **options),
        "honest": tally(model, states[:, 0][:, None].to(half), draw[:, 0].tolist(), **options),
    }


def noisy(model: LanguageModel, count: int, seed: int) -> dict:
    """Prose with noise of one per cent, and a tolerance that lets it through."""
    from preimage.prompts import PromptOptions, gather

    options = PromptOptions(count=count, length=24, seed=seed)
    prompts = list(gather("default:prose", model, options))
    generator = torch.Generator().manual_seed(seed)
    statuses: Counter[str] = Counter()
    wrong = 0
    for ids in prompts:
        own = model.states(torch.tensor([ids]), (LAYER,))[LAYER][0].cpu()
        noise = torch.randn(own.shape, generator=generator)
        own = own + 0.01 * own.norm(dim=-1, keepdim=True) * torch.nn.functional.normalize(noise, dim=-1)
        (found,) = preimage.invert(model, own, LAYER, tolerance=0.012, timeout=20.0)
        statuses[found.status] += 1
        wrong += found.status == "recovered" and found.token_ids != tuple(ids)
    return {"statuses": dict(statuses), "wrong": wrong}


def main() -> None:
    """All attacks, written as each part ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    single = preimage.load(given.model, dtype="float32", device=given.device)
    document: dict[str, object] = {"layer": LAYER, "count": given.count, "hardware": hardware(single.device)}
    document["float32 model, bfloat16 copies"] = attack(single, given.count, given.seed)
    given.out.write_text(json.dumps(document, indent=1))
    del single
    half = preimage.load(given.model, dtype="bfloat16", device=given.device)
    document["bfloat16 model"] = attack(half, given.count, given.seed)
    given.out.write_text(json.dumps(document, indent=1))
    del half
    single = preimage.load(given.model, dtype="float32", device=given.device)
    document["noise of 1 %, tolerance 0.012"] = noisy(single, max(1, given.count // 10), given.seed)
    given.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
