"""Which prompt made this hidden state, and could any other have made it?

Public names are loaded when first used: ``import preimage`` itself does not import torch.
"""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.collisions import CollisionAudit as CollisionAudit
    from preimage.collisions import CollisionOptions as CollisionOptions
    from preimage.collisions import ContinuationScan as ContinuationScan
    from preimage.collisions import find_collisions as find_collisions
    from preimage.collisions import scan_continuations as scan_continuations
    from preimage.collisions import sweep_lengths as sweep_lengths
    from preimage.distances import closest_pairs as closest_pairs
    from preimage.distances import nearest_neighbors as nearest_neighbors
    from preimage.distances import nearest_neighbours as nearest_neighbours
    from preimage.errors import PreimageError as PreimageError
    from preimage.geometry import Geometry as Geometry
    from preimage.geometry import GeometryOptions as GeometryOptions
    from preimage.geometry import GeometrySweep as GeometrySweep
    from preimage.geometry import Quantiser as Quantiser
    from preimage.geometry import SweepOptions as SweepOptions
    from preimage.geometry import measure_geometry as measure_geometry
    from preimage.geometry import sweep_geometry as sweep_geometry
    from preimage.inversion import Inversion as Inversion
    from preimage.inversion import InvertOptions as InvertOptions
    from preimage.inversion import invert as invert
    from preimage.models import LanguageModel as LanguageModel
    from preimage.models import ModelPreview as ModelPreview
    from preimage.models import load as load
    from preimage.models import read_preview as read_preview
    from preimage.prompts import PromptOptions as PromptOptions
    from preimage.prompts import PromptSet as PromptSet
    from preimage.prompts import gather as gather
    from preimage.states import States as States
    from preimage.states import capture as capture
    from preimage.states import noise_floor as noise_floor
    from preimage.states import open_states as open_states
    from preimage.theory import OptimiserOptions as OptimiserOptions
    from preimage.theory import TheoryReport as TheoryReport
    from preimage.theory import build_collision as build_collision
    from preimage.theory import check_analyticity as check_analyticity
    from preimage.theory import check_dichotomy as check_dichotomy
    from preimage.theory import check_optimiser as check_optimiser
    from preimage.theory import check_symmetry as check_symmetry
    from preimage.theory import distance_to_collision as distance_to_collision
    from preimage.theory import search_structure as search_structure
    from preimage.training import LensOptions as LensOptions
    from preimage.training import Trajectory as Trajectory
    from preimage.training import TrajectoryOptions as TrajectoryOptions
    from preimage.training import train_lens as train_lens
    from preimage.training import train_trajectory as train_trajectory

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "collisions": "CollisionAudit CollisionOptions ContinuationScan find_collisions scan_continuations "
        "sweep_lengths",
        "distances": "closest_pairs nearest_neighbors nearest_neighbours",
        "errors": "PreimageError",
        "geometry": "Geometry GeometryOptions GeometrySweep Quantiser SweepOptions measure_geometry "
        "sweep_geometry",
        "inversion": "Inversion InvertOptions invert",
        "models": "LanguageModel ModelPreview load read_preview",
        "prompts": "PromptOptions PromptSet gather",
        "states": "States capture noise_floor open_states",
        "theory": "OptimiserOptions TheoryReport build_collision check_analyticity check_dichotomy "
        "check_optimiser check_symmetry distance_to_collision search_structure",
        "training": "LensOptions Trajectory TrajectoryOptions train_lens train_trajectory",
    },
)
