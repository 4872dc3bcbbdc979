"""Plans of the long commands: pieces, tokens, pairs, memory, disk, and the time of each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from preimage.devices import BATCH_TOKENS, by_device
from preimage.geometry.options import GeometryOptions
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.planning.calibration import Calibration, calibrate
from preimage.planning.result import Stage, WorkPlan
from preimage.states.batches import Piece, cut
from preimage.states.layout import Layout, group_by_length

_BASE = 900 << 20  # bytes of a process that has imported everything
_NOISE_PASSES = 24  # of 64 tokens, for the noise floor
_DRAWN_TOKENS = 4 * 1024  # that confirm structure: two draws, two passes each
_DOUBLE = 6.0  # what a pass in float64 costs, drawing its weights included, in passes in float32
_HARD_TOKENS = 150  # prompts of hard pairs, for each base
_BLOCK = 256  # columns of which a scan keeps one number for every row
_OTHERS = 5.0  # what a layer's ratios, quantised copies and subsets cost in geometry, beside its pairs


def plan_capture(
    model: LanguageModel,
    lengths: Sequence[int],
    layers: Sequence[Layer],
    *,
    positions: str = "all",
    batch_tokens: int | None = None,
    load_seconds: float = 0.0,
    workers: int = 1,
) -> WorkPlan:
    """What capturing prompts of these lengths costs."""
    speed = _speed(model, layers, lengths, load_seconds)
    batch = batch_tokens or (1 if model.device.type == "cpu" else by_device(BATCH_TOKENS, model.device))
    kept = sum(lengths) if positions == "all" else len(lengths)
    disk = kept * _state_bytes(model) * len(layers)
    stages = [_noise(speed), _capture(model, lengths, layers, batch, speed)]
    longest = max(1, batch, max(lengths))
    memory = _memory(model, longest * len(layers))
    return _plan("capture", model, stages, _Costs(sum(lengths), 0, memory, disk), workers, speed)


def plan_collisions(
    model: LanguageModel,
    lengths: Sequence[int],
    layers: Sequence[Layer],
    *,
    hard_bases: int = 4,
    load_seconds: float = 0.0,
    workers: int = 1,
) -> WorkPlan:
    """What a collision search over prompts of these lengths costs."""
    speed, count = _speed(model, layers, lengths, load_seconds), len(lengths)
    batch = by_device(BATCH_TOKENS, model.device)
    longest = max(lengths)
    hard = [longest] * (_HARD_TOKENS * hard_bases)
    drawn = min(_DRAWN_TOKENS, 4 * longest * (count + len(hard)))
    stages = [
        _noise(speed),
        _capture(model, lengths, layers, batch, speed),
        Stage("hard pairs captured", 1, sum(hard) * speed.per_token),
        Stage("structure confirmed", 1, drawn * speed.per_token * _DOUBLE, serial=True),
        Stage("layers compared", len(layers), speed.layer(count)),
    ]
    disk = (count + len(hard)) * _state_bytes(model) * len(layers)
    memory = max(_memory(model, batch * len(layers)), _memory(model, 0) + scan_bytes(count, model))
    tokens, pairs = sum(lengths) + sum(hard), len(layers) * (count * (count - 1) // 2)
    return _plan("collisions", model, stages, _Costs(tokens, pairs, memory, disk), workers, speed)


def plan_geometry(
    model: LanguageModel,
    lengths: Sequence[int],
    layers: Sequence[Layer],
    options: GeometryOptions,
    *,
    load_seconds: float = 0.0,
    workers: int = 1,
) -> WorkPlan:
    """What a measurement of prompts of these lengths costs."""
    speed, count = _speed(model, layers, lengths, load_seconds), len(lengths)
    precisions = len(set(options.bits) | {None})
    batch = by_device(BATCH_TOKENS, model.device)
    stages = [
        _noise(speed),
        _capture(model, lengths, layers, batch, speed),
        Stage("layers measured", len(layers), precisions * _OTHERS * speed.layer(count)),
    ]
    disk = count * _state_bytes(model) * len(layers)
    memory = max(_memory(model, batch * len(layers)), _memory(model, 0) + 2 * scan_bytes(count, model))
    pairs = precisions * len(layers) * (count * (count - 1) // 2)
    return _plan("geometry", model, stages, _Costs(sum(lengths), pairs, memory, disk), workers, speed)


def plan_continuations(
    model: LanguageModel, lengths: Sequence[int], *, load_seconds: float = 0.0, workers: int = 1
) -> WorkPlan:
    """What scanning all continuations of prefixes of these lengths costs."""
    vocabulary = model.vocab_size
    speed = calibrate(model, ("final",), 1, vocabulary, load_seconds)
    each = vocabulary * speed.per_token + speed.layer(vocabulary)
    stages = [_noise(speed), Stage("prefixes", len(lengths), each)]
    memory = _memory(model, vocabulary) + scan_bytes(vocabulary, model)
    tokens, pairs = len(lengths) * vocabulary + sum(lengths), len(lengths) * math.comb(vocabulary, 2)
    return _plan("continuations", model, stages, _Costs(tokens, pairs, memory, 1 << 20), workers, speed)


def plan_inversion(
    model: LanguageModel,
    lengths: Sequence[int],
    invert_one: Callable[[], tuple[float, float, int]],
    *,
    load_seconds: float = 0.0,
    workers: int = 1,
) -> WorkPlan:
    """What inverting prompts of these lengths costs, by what the first of them does.

    ``invert_one`` inverts it: seconds of set-up and of the work, and tokens of forward passes.
    """
    setup, seconds, tokens = invert_one()
    speed = Calibration(model.device.type, load_seconds, seconds / max(1, lengths[0]), 0.0, 0.0, 0.0)
    mean = sum(lengths) / len(lengths)
    each = speed.per_token * mean
    stages = [Stage("set-up", 1, setup, serial=True), Stage("prompts inverted", len(lengths), each)]
    memory = _memory(model, 4096) + (2 * model.vocab_size * model.d_model * 4)
    forward = int(tokens * sum(lengths) / max(1, lengths[0]))
    return _plan("invert", model, stages, _Costs(forward, 0, memory, 4096 * len(lengths)), workers, speed)


def scan_bytes(rows: int, model: LanguageModel) -> int:
    """What comparing all pairs of so many states holds: copies of the states, and minima of blocks."""
    width = model.d_model + 8
    states = rows * width * (4 * _state_bytes(model) // model.d_model + 2 * 4)
    return states + 3 * 5 * rows * math.ceil(rows / _BLOCK) + (512 << 20)


def _speed(
    model: LanguageModel, layers: Sequence[Layer], lengths: Sequence[int], load_seconds: float
) -> Calibration:
    return calibrate(model, layers, max(1, round(sum(lengths) / len(lengths))), len(lengths), load_seconds)


def _noise(speed: Calibration) -> Stage:
    return Stage("noise floor", 1, _NOISE_PASSES * speed.small_pass, serial=True)


def _capture(
    model: LanguageModel, lengths: Sequence[int], layers: Sequence[Layer], batch: int, speed: Calibration
) -> Stage:
    layout = Layout(group_by_length(lengths), tuple(layers), "last", model.d_model)
    pieces = len(cut(layout, batch, Piece(0, len(lengths))))
    small = batch < 256 and speed.small_pass > 64 * speed.per_token  # a pass a prompt
    seconds = len(lengths) * speed.small_pass if small else sum(lengths) * speed.per_token
    return Stage("pieces captured", pieces, seconds / pieces)


def _state_bytes(model: LanguageModel) -> int:
    return model.d_model * int(torch.empty(0, dtype=model.dtype).element_size())


def _memory(model: LanguageModel, kept_states: int) -> int:
    """A process with a model, and what a pass keeps of so many states beside what it computes with."""
    weights = sum(weight.numel() * weight.element_size() for weight in model.module.parameters())
    return _BASE + int(1.5 * weights) + 2 * kept_states * _state_bytes(model)


class _Costs(NamedTuple):
    """What work costs beside its time."""

    tokens: int
    pairs: int
    memory: int
    disk: int


def _plan(
    command: str,
    model: LanguageModel,
    stages: Sequence[Stage],
    costs: _Costs,
    workers: int,
    speed: Calibration,
) -> WorkPlan:
    return WorkPlan(
        command, model.name, tuple(stages), *costs, workers, speed.device, speed.load_seconds, speed.to_dict()
    )
