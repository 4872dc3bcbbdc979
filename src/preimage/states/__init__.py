"""Hidden states: capture, bundles, noise floor, and what was seen of them."""

from preimage.states.bundle import open_states
from preimage.states.capture import capture, encode_all
from preimage.states.layout import Positions
from preimage.states.noise import SAFETY, calibration_prompts, measure_noise, noise_floor
from preimage.states.observation import Observation, residual_stream, storage_roundoff
from preimage.states.states import States
from preimage.states.tensor_input import read_tensor

__all__ = [
    "SAFETY",
    "Observation",
    "Positions",
    "States",
    "calibration_prompts",
    "capture",
    "encode_all",
    "measure_noise",
    "noise_floor",
    "open_states",
    "read_tensor",
    "residual_stream",
    "storage_roundoff",
]
