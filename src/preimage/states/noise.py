"""The noise floor: how far the same prompt lands from itself when it is computed in another shape.

Floating-point sums depend on batch size, sequence length and on whether a prefix came from a cache. A
distance below this floor means nothing, so the floor is measured, for each model, layer, dtype and device,
and stored with every result.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.distances import norms
from preimage.errors import RunFolderError
from preimage.layers import LayerSpec, all_layers, parse_layers
from preimage.models import LanguageModel, cache_folder, depth, require_model
from preimage.observations import Site, Tap
from preimage.progress import stage
from preimage.prompts import PromptOptions, gather
from preimage.storage import write_json

log = logging.getLogger(__name__)

SAFETY = 16.0  # measured floors that still are noise, in single and double precision
_ANOTHER_MAP = 1000.0  # times what other shapes change, and above half the digits: not rounding
_LENGTH = 64
_TRUNCATED = (3, 8, 32)  # into so many parts, of which the first is run alone: short passes round otherwise
_CANDIDATES = (1, 32)  # tokens tried at once on a cached prefix
_RECIPE = 4  # raise when the measurement changes
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

    The floor is the largest difference seen over a few prompts, and its tail is heavy: other prompts differ
    by several times that. In float32 other tokens lie thousands of floors away, in half precision tens.
    """
    return SAFETY if torch.finfo(dtype).eps < 1e-4 else SAFETY / 4


def noise_floor(model: LanguageModel, layers: LayerSpec | Sequence[Tap]) -> dict[Tap, float]:
    """Largest relative difference |h - h'|_2 / |h|_2 at each layer, over shapes and positions.

    It is that of the model in the type and on the device in which it is used. ``layers``: a layer, several,
    ``"1,8,final"`` or ``"all"``; or sites inside blocks. Cost: four prompts of 64 tokens (in half precision
    eight) in seven shapes, about twenty passes of one of them (in half precision forty), no deeper than the
    deepest layer that is not known yet; every layer below it is measured with it. Then it is kept in this
    process and in the user's cache.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> 0 < preimage.noise_floor(model, 1)[1] < 1e-5
    True
    """
    return {layer: noise.relative for layer, noise in noise_of(model, layers).items()}


def noise_of(model: LanguageModel, layers: LayerSpec | Sequence[Tap]) -> dict[Tap, Noise]:
    """The same in full."""
    require_model(model)
    taps = _parse_taps(layers, model.n_layers)
    edition, known = _measured.get(model, (-1, {}))
    now = model.edition
    if edition != now:
        known = _load(model) if model.lasting else {}
    missing = [tap for tap in taps if tap not in known]
    sites = [tap for tap in missing if isinstance(tap, Site)]
    if len(missing) > len(sites):
        every = all_layers(model.n_layers)
        known = measure_noise(model, every[: every.index(missing[-1]) + 1]) | known
    if sites:
        known |= measure_noise(model, sites)
    if missing:
        now = model.edition  # passes may have filled buffers
        if model.lasting:
            _save(model, known)
    _measured[model] = now, known
    return {tap: known[tap] for tap in taps}


def told_noise(model: LanguageModel, layers: LayerSpec | Sequence[Tap]) -> dict[str, list[float]]:
    """The same in plain json types, for :func:`adopt_noise`."""
    return {str(tap): list(noise) for tap, noise in noise_of(model, layers).items()}


def adopt_noise(model: LanguageModel, told: Mapping[str, Sequence[float]]) -> None:
    """Take what somebody else measured of the same model for its noise in this process.

    Workers judge by what the process measured that they work for, so that it does not matter who they are.
    """
    known = {_named(name): Noise(*map(float, numbers)) for name, numbers in told.items()}
    edition, before = _measured.get(model, (-1, {}))
    _measured[model] = model.edition, (before if edition == model.edition else {}) | known


def measure_noise(model: LanguageModel, taps: Sequence[Tap] = ()) -> dict[Tap, Noise]:
    """Recompute the same prompts in other shapes and keep the largest differences, a layer each or a site.

    ``taps``: 0 and every layer up to some layer, or sites; without any, all layers. What is found of a layer
    is the same to the bit however many layers above it are measured.
    """
    stage("noise floor")
    taps = sorted(taps, key=depth) or all_layers(model.n_layers)
    # where fewer floors are allowed, more prompts say what the floor is
    prompts = calibration_prompts(model, 2 if safety(model.dtype) == SAFETY else 4)
    alone = _joined([model.states(prompt[None], taps) for prompt in prompts])
    plain = [_batched(model, prompts, taps), *(_truncated(model, prompts, taps, n) for n in _TRUNCATED)]
    cached = _cached(model, prompts, taps)
    unit = torch.finfo(model.dtype).eps / 2
    noise: dict[Tap, Noise] = {}
    same_map = True
    for tap in taps:
        reference = _Reference.of(alone[tap])
        noise[tap] = reference.widened(Noise(unit, 0.0, reference.longest), plain, tap)
        if not same_map or tap not in cached.states:
            continue
        wider = reference.widened(noise[tap], [cached], tap)
        if wider.relative > max(unit**0.5, _ANOTHER_MAP * noise[tap].relative):
            log.warning("%s keeps something outside its cache: on a prefix it is another map", model.name)
            same_map = False  # nor is it above
        else:
            noise[tap] = wider
    return noise


def _parse_taps(given: LayerSpec | Sequence[Tap], n_layers: int) -> tuple[Tap, ...]:
    """Layers, as everywhere; or sites alone, one or several."""
    if isinstance(given, Site):
        return (given,)
    if isinstance(given, list | tuple) and given and all(isinstance(one, Site) for one in given):
        return tuple(given)
    return parse_layers(given, n_layers)  # type: ignore[arg-type]  # what is no layer is refused there


class _Shape(NamedTuple):
    """States of some positions of the prompts, computed in another shape."""

    prompts: Int[Tensor, " row"]
    positions: Int[Tensor, " row"]
    states: dict[Tap, Float[Tensor, "row _"]]


class _Reference(NamedTuple):
    """What every other shape is compared with at one tap: each prompt alone, in one plain pass."""

    states: Float[Tensor, "prompt position d"]
    lengths: Float[Tensor, "prompt position"]
    weights: Float[Tensor, "prompt position d"]
    longest: float  # tempered

    @classmethod
    def of(cls, states: Float[Tensor, "prompt position d"]) -> _Reference:
        tiny = torch.finfo(torch.float64).tiny
        weights = outlier_weights(states)
        longest = float(norms(tempered(states, weights)).max())
        # a padding token's embedding may be all zeros; it has no relative error, and no noise either
        lengths = norms(states).clamp_min(tiny)
        return cls(states, lengths, weights, max(longest, torch.finfo(torch.float32).tiny))

    def widened(self, noise: Noise, shapes: Sequence[_Shape], tap: Tap) -> Noise:
        """Noise that also covers how far these shapes are from this one."""
        for prompts, positions, states in shapes:
            at = prompts, positions
            difference = states[tap].to(torch.float64) - self.states[at].to(torch.float64)
            relative = norms(difference) / self.lengths[at]
            absolute = norms(tempered(difference, self.weights[at]))
            noise = noise._replace(
                relative=max(noise.relative, _largest(relative)),
                absolute=max(noise.absolute, _largest(absolute)),
            )
        return noise


def _largest(numbers: Float[Tensor, " row"]) -> float:
    """The largest of some numbers; what overflowed on both sides differs by NaN, and says nothing."""
    return float(numbers.nan_to_num(nan=0.0, posinf=torch.inf).max())


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


def _joined(parts: Sequence[dict[Tap, Tensor]]) -> dict[Tap, Tensor]:
    """States of several passes, one behind another along their first axis."""
    return {tap: torch.cat([part[tap] for part in parts]) for tap in parts[0]}


def _beginnings(count: int, length: int, states: dict[Tap, Float[Tensor, "prompt position _"]]) -> _Shape:
    """States of the first ``length`` positions of ``count`` prompts."""
    places = torch.cartesian_prod(torch.arange(count), torch.arange(length))
    return _Shape(places[:, 0], places[:, 1], {tap: rows.flatten(0, 1) for tap, rows in states.items()})


def _batched(model: LanguageModel, prompts: Int[Tensor, "prompt position"], taps: Sequence[Tap]) -> _Shape:
    """All prompts in one pass."""
    return _beginnings(len(prompts), prompts.shape[1], model.states(prompts, taps))


def _truncated(
    model: LanguageModel, prompts: Int[Tensor, "prompt position"], taps: Sequence[Tap], parts: int
) -> _Shape:
    """The first of so many equal parts of each prompt, alone."""
    length = max(1, prompts.shape[1] // parts)
    states = [model.states(prompt[None, :length], taps) for prompt in prompts]
    return _beginnings(len(prompts), length, _joined(states))


def _cached(model: LanguageModel, prompts: Int[Tensor, "prompt position"], taps: Sequence[Tap]) -> _Shape:
    """A token of each prompt on a cached prefix, at the taps up to which the model has such a shape.

    A model with a cache of its own, or none, fails in some block and in every pass that reaches it: how far
    it comes is found by halving, so that what is said of a tap does not depend on those above it.
    """
    works, fails = 0, len(taps) + 1
    shape, nothing = None, torch.zeros(0, dtype=torch.long)
    while fails - works > 1:
        reach = len(taps) if fails > len(taps) else (works + fails) // 2
        try:
            shape, works = _on_a_prefix(model, prompts, taps[:reach]), reach
        except Exception as error:
            if fails > len(taps):
                log.warning("%s has no cached prefix, and its noise is that without: %s", model.name, error)
            fails = reach
    return shape or _Shape(nothing, nothing, {})


def _on_a_prefix(
    model: LanguageModel, prompts: Int[Tensor, "prompt position"], taps: Sequence[Tap]
) -> _Shape:
    """A token of each prompt on what precedes it, cached: alone, and among other candidates.

    It is the first, the second, one in the middle and the last, in turn, beginning with the prompts of random
    tokens: those make the noisiest first states.
    """
    count, length = prompts.shape
    places = (0, min(1, length - 1), length // 2, length - 1)
    splits = [places[(row - count // 2) % 4] for row in range(count)]
    states: list[dict[Tap, Tensor]] = []
    for prompt, split in zip(prompts, splits, strict=True):
        prefix = model.prefix(taps[-1])
        if split:
            prefix.extend(prompt[:split])
        for candidates in _CANDIDATES:
            ids = prompt[split].repeat(candidates)
            ids[1:] = torch.arange(candidates - 1) % model.vocab_size
            states.append({tap: rows[:1] for tap, rows in prefix.try_layers(ids, taps).items()})
    times = len(_CANDIDATES)
    rows = torch.arange(len(prompts)).repeat_interleave(times)
    return _Shape(rows, torch.tensor(splits).repeat_interleave(times), _joined(states))


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
    digest = hashlib.sha256(f"{model.weight_hash} {kind}".encode()).hexdigest()[:24]
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
    noise = _load(model) | noise  # another process may have measured other layers meanwhile
    try:
        write_json(path, {str(layer): list(numbers) for layer, numbers in noise.items()})
    except RunFolderError as error:  # a cache that cannot be written costs time, nothing else
        log.warning("the noise floor could not be cached: %s", error)
