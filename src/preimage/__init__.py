"""Which prompt made this hidden state, and could any other have made it?

Public names are loaded when first used: ``import preimage`` itself does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.collisions import CollisionOptions, find_collisions, scan_continuations
    from preimage.distances import closest_pairs, nearest_neighbors
    from preimage.errors import PreimageError
    from preimage.geometry import (
        GeometryOptions,
        TrajectoryOptions,
        measure_geometry,
        sweep_geometry,
        train_trajectory,
    )
    from preimage.inversion import InvertOptions, invert
    from preimage.models import LanguageModel, load
    from preimage.prompts import PromptOptions, PromptSet
    from preimage.results import CollisionAudit, ContinuationScan, Inversion, Trajectory
    from preimage.states import States, capture, noise_floor, open_states

__version__ = "0.1.0"

_HOMES = {
    "CollisionAudit": "results",
    "CollisionOptions": "collisions",
    "ContinuationScan": "results",
    "GeometryOptions": "geometry",
    "Inversion": "results",
    "InvertOptions": "inversion",
    "LanguageModel": "models",
    "PreimageError": "errors",
    "PromptOptions": "prompts",
    "PromptSet": "prompts",
    "States": "states",
    "Trajectory": "results",
    "TrajectoryOptions": "geometry",
    "capture": "states",
    "closest_pairs": "distances",
    "find_collisions": "collisions",
    "invert": "inversion",
    "load": "models",
    "measure_geometry": "geometry",
    "nearest_neighbors": "distances",
    "noise_floor": "states",
    "open_states": "states",
    "scan_continuations": "collisions",
    "sweep_geometry": "geometry",
    "train_trajectory": "geometry",
}

__all__ = [
    "CollisionAudit",
    "CollisionOptions",
    "ContinuationScan",
    "GeometryOptions",
    "Inversion",
    "InvertOptions",
    "LanguageModel",
    "PreimageError",
    "PromptOptions",
    "PromptSet",
    "States",
    "Trajectory",
    "TrajectoryOptions",
    "__version__",
    "capture",
    "closest_pairs",
    "find_collisions",
    "invert",
    "load",
    "measure_geometry",
    "nearest_neighbors",
    "noise_floor",
    "open_states",
    "scan_continuations",
    "sweep_geometry",
    "train_trajectory",
]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
