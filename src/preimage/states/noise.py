"""The noise floor: how far the same prompt lands from itself when it is computed in another shape.

Floating-point sums depend on batch size, sequence length and on whether a prefix came from a cache. A
distance below this floor means nothing, so the floor is measured, for each model, layer, dtype and device,
and stored with every result.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.layers import Layer
from preimage.models import LanguageModel, cache_folder
from preimage.prompts import PromptOptions, gather

log = logging.getLogger(__name__)

# The floor is the largest difference seen over a few prompts, and its tail is heavy: over 64 random prompts
# of the default model the largest was 6 to 15 times that. Two states of one layer are the same but for noise
# when they are no further apart than so many floors of the longer one: in inversion and in collisions.
SAFETY = 16.0
_LENGTH = 64
_RECIPE = 1  # raise when the measurement changes
_measured: weakref.WeakKeyDictionary[LanguageModel, dict[Layer, float]]
_measured = weakref.WeakKeyDictionary()


def noise_floor(model: LanguageModel, layers: Sequence[Layer]) -> dict[Layer, float]:
    """Largest relative difference |h - h'|_2 / |h|_2 at each layer, over shapes and positions.

    Measured once for a model (about ten short passes over all layers), then kept in this process and in the
    user's cache.
    """
    known = _measured.get(model) or (_load(model) if model.lasting else None)
    if known is None:
        known = measure_noise(model)
        if model.lasting:
            _save(model, known)
    _measured[model] = known
    return {layer: known[layer] for layer in layers}


def measure_noise(model: LanguageModel) -> dict[Layer, float]:
    """Recompute the same prompts in other shapes and keep the largest relative difference a layer."""
    layers: tuple[Layer, ...] = (*range(model.n_layers + 1), "final")
    prompts = calibration_prompts(model)
    alone = [{k: v[0] for k, v in model.states(p[None], layers).items()} for p in prompts]
    floor: dict[Layer, float] = dict.fromkeys(layers, 0.0)
    for row, start, found in _other_shapes(model, prompts, layers):
        for layer, states in found.items():
            reference = alone[row][layer][start : start + len(states)]
            # a padding token's embedding may be all zeros; it has no relative error, and no noise either
            scale = norms(reference).clamp_min(torch.finfo(torch.float64).tiny)
            relative = row_distances(states, reference) / scale
            floor[layer] = max(floor[layer], float(relative.max()))
    # A layer that happened to reproduce every bit still rounds: half a unit in the last place.
    unit = torch.finfo(model.dtype).eps / 2
    return {layer: max(value, unit) for layer, value in floor.items()}


def _other_shapes(
    model: LanguageModel, prompts: Int[Tensor, "prompt position"], layers: Sequence[Layer]
) -> Iterator[tuple[int, int, dict[Layer, Tensor]]]:
    """(prompt, first position, states) of the same prompts: batched, truncated, on a cached prefix."""
    batch = model.states(prompts, layers)
    for row in range(len(prompts)):
        yield row, 0, {layer: states[row] for layer, states in batch.items()}
    length = len(prompts[0])
    for row, prompt in enumerate(prompts):
        short = prompt[: max(1, length // 3)]
        yield row, 0, {layer: s[0] for layer, s in model.states(short[None], layers).items()}
        split = [0, 1, length // 2, length - 1][row % 4]
        yield from _cached(model, row, prompt, split, layers)


def _cached(
    model: LanguageModel, row: int, prompt: Tensor, split: int, layers: Sequence[Layer]
) -> Iterator[tuple[int, int, dict[Layer, Tensor]]]:
    """The token at ``split`` tried on its cached prefix, alone and among other candidates."""
    deepest = layers[-1]
    prefix = model.prefix(deepest)
    if split:
        prefix.extend(prompt[:split])
    for candidates in (1, 32):
        ids = prompt[split].repeat(candidates)
        ids[1:] = torch.arange(candidates - 1) % model.vocab_size
        found = prefix.try_layers(ids, layers)
        yield row, split, {layer: states[:1] for layer, states in found.items()}


def calibration_prompts(model: LanguageModel, count: int = 4) -> Int[Tensor, "prompt position"]:
    """``count`` prompts of prose where there is a tokenizer and as many of random tokens, equally long."""
    length = min(_LENGTH, model.max_length or _LENGTH)
    limits: dict[str, Any] = {"vocab_size": model.vocab_size, "max_length": model.max_length}
    sources = ["random", "random"] if model.tokenizer is None else ["default:prose:train", "random"]
    found: list[tuple[int, ...]] = []
    for seed, source in enumerate(sources):
        options = PromptOptions(count=count, length=length, seed=seed, keep_duplicates=True)
        found += gather(source, model.tokenizer, options, **limits)
    return torch.tensor(found)


def _cache_file(model: LanguageModel) -> Any:
    where = f"{model.device.type}-{torch.get_num_threads()}t-torch{torch.__version__}-v{_RECIPE}"
    return cache_folder() / "noise" / f"{model.identity.weight_hash[:24]}-{where}.json"


def _load(model: LanguageModel) -> dict[Layer, float] | None:
    try:
        saved = json.loads(_cache_file(model).read_text(encoding="utf-8"))
        return {"final" if k == "final" else int(k): float(v) for k, v in saved.items()}
    except (OSError, ValueError, AttributeError):
        return None


def _save(model: LanguageModel, floor: dict[Layer, float]) -> None:
    path = _cache_file(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{id(model)}.partial")
        temporary.write_text(json.dumps({str(k): v for k, v in floor.items()}), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:  # a cache that cannot be written costs time, nothing else
        log.warning("the noise floor could not be cached: %s", error)
