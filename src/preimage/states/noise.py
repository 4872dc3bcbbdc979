"""The noise floor: how far the same prompt lands from itself when it is computed in another shape.

Floating-point sums depend on batch size, sequence length and on whether a prefix came from a cache. A
distance below this floor means nothing, so the floor is measured, for each model, layer, dtype and device,
and stored with every result.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import norms
from preimage.errors import RunFolderError
from preimage.layers import LayerSpec, parse_layers
from preimage.models import LanguageModel, cache_folder, depth
from preimage.observations import Site, Tap
from preimage.prompts import PromptOptions, gather
from preimage.storage import write_json

log = logging.getLogger(__name__)

SAFETY = 16.0  # measured floors that still are noise, in single and double precision
_ANOTHER_MAP = 1000.0  # times what other shapes change, and above half the digits: not rounding
_LENGTH = 64
_RECIPE = 3  # raise when the measurement changes
_OUTLIERS = 16  # one coordinate in so many may be an outlier
_OUTLIER = 4.0  # an outlier is so many times as long as the root mean square of the rest


class Noise(NamedTuple):
    """How far apart the same prompts were, computed in other shapes, at one layer."""

    relative: float  # largest |h - h'| / |h|
    absolute: float  # largest |h - h'| once outliers are tempered, the same for short states and for sinks
    longest: float  # the longest state this was seen on, tempered


# The noise of models in memory, with the edition it was measured at.
_measured: WeakKeyDictionary[LanguageModel, tuple[int, dict[Tap, Noise]]] = WeakKeyDictionary()


def safety(dtype: torch.dtype) -> float:
    """How many measured floors still are noise: in inversion and in collisions.

    The floor is the largest difference seen over a few prompts, and its tail is heavy: over 64 prompts of the
    default model the largest was up to 22 times that in float32, where other tokens lie thousands of floors
    away, and up to 2.6 times in bfloat16, where they lie tens away.
    """
    return SAFETY if torch.finfo(dtype).eps < 1e-4 else SAFETY / 4


def noise_floor(model: LanguageModel, layers: LayerSpec | Sequence[Tap]) -> dict[Tap, float]:
    """Largest relative difference |h - h'|_2 / |h|_2 at each layer, over shapes and positions.

    It is that of the model in the type and on the device in which it is used. ``layers``: a layer, several,
    ``"1,8,final"`` or ``"all"``; or sites inside blocks. Cost: about ten short passes over all layers, once
    for a model, or up to a site, once for it; then kept in this process and in the user's cache.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> 0 < preimage.noise_floor(model, 1)[1] < 1e-5
    True
    """
    return {layer: noise.relative for layer, noise in noise_of(model, layers).items()}


def noise_of(model: LanguageModel, layers: LayerSpec | Sequence[Tap]) -> dict[Tap, Noise]:
    """The same in full."""
    taps = _parse_taps(layers, model.n_layers)
    edition, known = _measured.get(model, (-1, {}))
    if edition != model.edition:
        known = _load(model) if model.lasting else {}
    missing = [tap for tap in taps if tap not in known]
    sites = [tap for tap in missing if isinstance(tap, Site)]
    if len(missing) > len(sites):
        known |= measure_noise(model)
    if sites:
        known |= measure_noise(model, sites)
    if missing and model.lasting:
        _save(model, known)
    _measured[model] = model.edition, known
    return {tap: known[tap] for tap in taps}


def measure_noise(model: LanguageModel, sites: Sequence[Site] = ()) -> dict[Tap, Noise]:
    """Recompute the same prompts in other shapes and keep the largest differences, a layer each or a site."""
    taps: Sequence[Tap] = sorted(sites, key=depth) or parse_layers("all", model.n_layers)
    prompts = calibration_prompts(model)
    alone = [{k: v[0] for k, v in model.states(p[None], taps).items()} for p in prompts]
    unit = torch.finfo(model.dtype).eps / 2
    noise = {tap: _rounding([one[tap] for one in alone], unit) for tap in taps}
    noise = _widened(noise, alone, _other_shapes(model, prompts, taps))
    try:
        cached = _widened(noise, alone, _cached_shapes(model, prompts, taps))
    except Exception as error:  # a model with a cache of its own, or none, has no such shape
        log.warning("%s has no cached prefix, and its noise is that without: %s", model.name, error)
        return noise
    for tap in taps:
        if cached[tap].relative > max(unit**0.5, _ANOTHER_MAP * noise[tap].relative):
            log.warning("%s keeps something outside its cache: on a prefix it is another map", model.name)
            return noise
    return cached


def _parse_taps(given: LayerSpec | Sequence[Tap], n_layers: int) -> tuple[Tap, ...]:
    """Layers, as everywhere; or sites alone, one or several."""
    if isinstance(given, Site):
        return (given,)
    if isinstance(given, list | tuple) and given and all(isinstance(one, Site) for one in given):
        return tuple(given)
    return parse_layers(given, n_layers)  # type: ignore[arg-type]  # what is no layer is refused there


def _rounding(states: Sequence[Float[Tensor, "position d"]], unit: float) -> Noise:
    """Before anything was compared: a layer that happens to reproduce every bit still rounds."""
    lengths = torch.cat([norms(tempered(one, outlier_weights(one))) for one in states])
    return Noise(unit, 0.0, max(float(lengths.max()), torch.finfo(torch.float32).tiny))


def _widened(
    noise: dict[Tap, Noise],
    alone: Sequence[dict[Tap, Tensor]],
    shapes: Iterator[tuple[int, int, dict[Tap, Tensor]]],
) -> dict[Tap, Noise]:
    """Noise that also covers the differences between prompts alone and in other shapes."""
    noise = dict(noise)
    for row, start, recomputed in shapes:
        for layer, states in recomputed.items():
            reference = alone[row][layer][start : start + len(states)]
            # a padding token's embedding may be all zeros; it has no relative error, and no noise either
            scale = norms(reference).clamp_min(torch.finfo(torch.float64).tiny)
            difference = states.to(torch.float64) - reference.to(torch.float64)
            relative = float((norms(difference) / scale).max())
            absolute = float(norms(tempered(difference, outlier_weights(reference))).max())
            known = noise[layer]
            noise[layer] = known._replace(
                relative=max(known.relative, relative), absolute=max(known.absolute, absolute)
            )
    return noise


def noise_radius(noise: Noise, lengths: Float[Tensor, "*row"], dtype: torch.dtype) -> Float[Tensor, "*row"]:
    """How far tempered states of these lengths may be from the same ones computed in another shape.

    Longer states than were measured get more in proportion. Where nothing was seen to change, rounding alone
    is left: in half precision a kernel reproduces every bit or is off by more than that.
    """
    factor, unit = safety(dtype), torch.finfo(dtype).eps / 2
    measured = factor * noise.absolute * (lengths / noise.longest).clamp_min(1.0)
    return torch.maximum(measured, unit * lengths * (factor if factor == SAFETY else 1.0))


def outlier_weights(states: Float[Tensor, "*row d"]) -> Float[Tensor, "*row d"]:
    """1 at ordinary coordinates of each state; at outliers, what brings them down to the size of the rest.

    A few coordinates of an attention sink are a thousand times as long as the others. What rounding does to
    them drowns every difference between tokens; weighted so, a sink is no noisier than any other state.
    """
    sizes = states.abs().to(torch.float32)
    width = sizes.shape[-1]
    rest = sizes.topk(width - width // _OUTLIERS, dim=-1, largest=False, sorted=False).values
    limit = _OUTLIER * rest.square().mean(dim=-1, keepdim=True).sqrt()
    return torch.where((sizes <= limit) | (limit == 0), 1.0, limit / sizes.clamp_min(1e-30))


def tempered(states: Float[Tensor, "*row d"], weights: Float[Tensor, "*row d"]) -> Float[Tensor, "*row d"]:
    """States or differences in float64, their outliers weighted down."""
    return states.to(torch.float64) * weights.to(torch.float64)


def _other_shapes(
    model: LanguageModel, prompts: Int[Tensor, "prompt position"], layers: Sequence[Tap]
) -> Iterator[tuple[int, int, dict[Tap, Tensor]]]:
    """(prompt, first position, states) of the same prompts: batched, truncated."""
    batch = model.states(prompts, layers)
    for row in range(len(prompts)):
        yield row, 0, {layer: states[row] for layer, states in batch.items()}
    for row, prompt in enumerate(prompts):
        short = prompt[: max(1, len(prompt) // 3)]
        yield row, 0, {layer: s[0] for layer, s in model.states(short[None], layers).items()}


def _cached_shapes(
    model: LanguageModel, prompts: Int[Tensor, "prompt position"], layers: Sequence[Tap]
) -> Iterator[tuple[int, int, dict[Tap, Tensor]]]:
    """(prompt, position, its state): a token on a cached prefix, alone and among other candidates."""
    for row, prompt in enumerate(prompts):
        split = [0, 1, len(prompt) // 2, len(prompt) - 1][row % 4]
        prefix = model.prefix(layers[-1])
        if split:
            prefix.extend(prompt[:split])
        for candidates in (1, 32):
            ids = prompt[split].repeat(candidates)
            ids[1:] = torch.arange(candidates - 1) % model.vocab_size
            tried = prefix.try_layers(ids, layers)
            yield row, split, {layer: states[:1] for layer, states in tried.items()}


def calibration_prompts(model: LanguageModel, count: int = 4) -> Int[Tensor, "prompt position"]:
    """``count`` prompts of prose where there is a tokenizer and as many of random tokens, equally long."""
    length = min(_LENGTH, model.max_length or _LENGTH)
    sources = ["random", "random"] if model.tokenizer is None else ["default:prose:train", "random"]
    prompts: list[tuple[int, ...]] = []
    for seed, source in enumerate(sources):
        options = PromptOptions(count=count, length=length, seed=seed, keep_duplicates=True)
        prompts += gather(source, model, options)
    return torch.tensor(prompts)


def _cache_file(model: LanguageModel) -> Path:
    """One for each map and each way of computing it: the same weights may stand under another config."""
    config: Any = model.module.config
    kind = f"{config.to_json_string(use_diff=False)} {config._attn_implementation} {model.tokenizer is None}"
    digest = hashlib.sha256(f"{model.identity.weight_hash} {kind}".encode()).hexdigest()[:24]
    cpu = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "-")
    where = f"{model.device.type}-{cpu}-{torch.get_num_threads()}t-torch{torch.__version__}-v{_RECIPE}"
    return cache_folder() / "noise" / f"{digest}-{where}.json"


def _load(model: LanguageModel) -> dict[Tap, Noise]:
    try:
        saved = json.loads(_cache_file(model).read_text(encoding="utf-8"))
        return {_named(name): Noise(*map(float, numbers)) for name, numbers in saved.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _named(name: str) -> Tap:
    """The layer or site of a name in the cache."""
    block, _, kind = name.partition(".")
    if kind:
        before = kind.endswith("-before-rotary")
        return Site(int(block), kind.removesuffix("-before-rotary"), "before" if before else "after")
    return "final" if name == "final" else int(name)


def _save(model: LanguageModel, noise: dict[Tap, Noise]) -> None:
    path = _cache_file(model)
    try:
        write_json(path, {str(layer): list(numbers) for layer, numbers in noise.items()})
    except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
        log.warning("the noise floor could not be cached: %s", error)
