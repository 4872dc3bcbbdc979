"""How far the nearest other token is, relative to a state: the D of the paper's D/2, position by position.

    python docs/results/noise_margins.py MODEL PROMPTS.json OUT.json [--device cuda] [--count 10]

At some positions of each prompt every token of the vocabulary is tried behind the true prefix. Noise shorter
than half the distance to the nearest other one cannot change which is nearest (Theorem 3.2 of arXiv
2510.15511).
"""

import argparse
import json
from pathlib import Path

import torch

import preimage
from preimage.bench.timing import hardware

POSITIONS = (0, 1, 2, 4, 8, 16, 32, 63)
LAYERS = (1, 15, 30)


@torch.inference_mode()
def margin(model: preimage.LanguageModel, ids: list[int], layer: int, at: int) -> float:
    """The distance to the nearest other token's state, relative to the length of the true one's."""
    prefix = model.prefix(layer)
    if at:
        prefix.extend(torch.tensor(ids[:at]))
    true = prefix.try_tokens(torch.tensor([ids[at]]))[0].double()
    nearest = torch.inf
    for tokens in torch.arange(model.vocab_size).split(prefix.max_candidates):
        away = (prefix.try_tokens(tokens).double() - true).norm(dim=1)
        away[tokens.to(away.device) == ids[at]] = torch.inf
        nearest = min(nearest, float(away.min()))
    return nearest / float(true.norm())


def main() -> None:
    """Measure, and write one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "prompts", "out"):
        parser.add_argument(name)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    model = preimage.load(given.model, device=given.device)
    prompts = json.loads(Path(given.prompts).read_text())[: given.count]
    found: dict[str, dict[str, list[float]]] = {str(layer): {} for layer in LAYERS}
    about = {"commit": given.commit, "hardware": hardware(torch.device(given.device))}
    for ids in prompts:
        for layer in LAYERS:
            for at in POSITIONS:
                found[str(layer)].setdefault(str(at), []).append(round(margin(model, ids, layer, at), 6))
        Path(given.out).write_text(json.dumps(about | {"margins": found}))


if __name__ == "__main__":
    main()
