"""Hidden states: capture, bundles, noise floor, and what was seen of them."""

from preimage.states.bundle import open_states
from preimage.states.caches import IN_A_CACHE, observed_width
from preimage.states.capture import capture, encode_all
from preimage.states.doors import states_from
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
from preimage.states.observation import (
    Observation,
    residual_stream,
    rounding_cell,
    storage_roundoff,
    stored_type,
)
from preimage.states.states import States
from preimage.states.tensor_input import StatesFile, read_states_file

__all__ = [
    "IN_A_CACHE",
    "SAFETY",
    "Noise",
    "Observation",
    "States",
    "StatesFile",
    "calibration_prompts",
    "capture",
    "encode_all",
    "group_by_length",
    "measure_noise",
    "noise_floor",
    "noise_of",
    "noise_radius",
    "observed_width",
    "open_states",
    "outlier_weights",
    "read_states_file",
    "residual_stream",
    "rounding_cell",
    "safety",
    "states_from",
    "storage_roundoff",
    "stored_type",
    "tempered",
]
