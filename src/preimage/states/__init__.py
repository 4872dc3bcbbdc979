"""Hidden states: capture, bundles, noise floor, and what was seen of them."""

from preimage.states.bundle import open_states
from preimage.states.caches import IN_A_CACHE, head_sizes, observed_width
from preimage.states.capture import capture, capture_for_run, encode_all
from preimage.states.codecs import Cells, dequantised, may_be_stored, stored_cells
from preimage.states.doors import states_from
from preimage.states.layout import group_by_length
from preimage.states.noise import (
    SAFETY,
    Noise,
    adopt_noise,
    calibration_prompts,
    measure_noise,
    noise_floor,
    noise_of,
    noise_radius,
    outlier_weights,
    safety,
    tempered,
    told_noise,
)
from preimage.states.observation import View, residual_stream, undone, view
from preimage.states.pieces import pack_ids, states_as_told, unpack_ids
from preimage.states.states import States
from preimage.states.tensor_input import StatesFile, read_states_file

__all__ = [
    "IN_A_CACHE",
    "SAFETY",
    "Cells",
    "Noise",
    "States",
    "StatesFile",
    "View",
    "adopt_noise",
    "calibration_prompts",
    "capture",
    "capture_for_run",
    "dequantised",
    "encode_all",
    "group_by_length",
    "head_sizes",
    "may_be_stored",
    "measure_noise",
    "noise_floor",
    "noise_of",
    "noise_radius",
    "observed_width",
    "open_states",
    "outlier_weights",
    "pack_ids",
    "read_states_file",
    "residual_stream",
    "safety",
    "states_as_told",
    "states_from",
    "stored_cells",
    "tempered",
    "told_noise",
    "undone",
    "unpack_ids",
    "view",
]
