"""Hidden states: capture, bundles, noise floor, and what was seen of them."""

from preimage.states.bundle import open_states
from preimage.states.capture import capture, encode_all
from preimage.states.codecs import Cells, dequantised, may_be_stored, stored_cells
from preimage.states.layout import group_by_length
from preimage.states.noise import (
    SAFETY,
    Noise,
    calibration_prompts,
    measure_noise,
    noise_floor,
    noise_of,
    noise_radius,
    outlier_weights,
    safety,
    tempered,
)
from preimage.states.observation import View, residual_stream, undone, view
from preimage.states.states import States
from preimage.states.tensor_input import read_tensor

__all__ = [
    "SAFETY",
    "Cells",
    "Noise",
    "States",
    "View",
    "calibration_prompts",
    "capture",
    "dequantised",
    "encode_all",
    "group_by_length",
    "may_be_stored",
    "measure_noise",
    "noise_floor",
    "noise_of",
    "noise_radius",
    "open_states",
    "outlier_weights",
    "read_tensor",
    "residual_stream",
    "safety",
    "stored_cells",
    "tempered",
    "undone",
    "view",
]
