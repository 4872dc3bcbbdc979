"""Thresholds that mean something: none below the noise floor."""

from __future__ import annotations

from collections.abc import Sequence

from preimage.distances import norms
from preimage.errors import OptionError
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.states import capture, noise_floor

_SAMPLE = 8  # prompts that tell how long states are


def require_above_noise(
    model: LanguageModel, ids: Sequence[tuple[int, ...]], layers: Sequence[Layer], thresholds: Sequence[float]
) -> None:
    """Refuse a threshold under the noise floor of a layer, before any other work is done."""
    if not thresholds:
        return
    lowest, floor = min(thresholds), noise_floor(model, layers)
    sample = capture(model, ids[:_SAMPLE], layers, positions="last")
    for layer in layers:
        noise = 2 * floor[layer] * float(norms(sample.last(layer)).median())
        if lowest < noise:
            raise OptionError(
                f"The threshold {lowest:g} is below the noise floor of layer {layer}, {noise:.2g}.",
                "Give a larger one, or leave this layer out.",
            )
