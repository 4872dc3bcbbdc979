"""Which prompt made this hidden state, and could any other have made it?

Public names are loaded when first used: ``import preimage`` itself does not import torch.
"""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.cluster import Cluster
    from preimage.collisions import (
        CollisionAudit,
        CollisionOptions,
        ContinuationScan,
        find_collisions,
        scan_continuations,
        sweep_lengths,
    )
    from preimage.distances import closest_pairs, nearest_neighbors, nearest_neighbours
    from preimage.errors import PreimageError
    from preimage.geometry import (
        Geometry,
        GeometryOptions,
        GeometrySweep,
        Quantiser,
        SweepOptions,
        measure_geometry,
        sweep_geometry,
    )
    from preimage.inversion import Inversion, InvertOptions, invert
    from preimage.leak import FilesAudit, LeakAudit, LeakOptions, measure_leak, read_files
    from preimage.models import LanguageModel, ModelPreview, load, read_preview
    from preimage.observations import Observation
    from preimage.prompts import PromptOptions, PromptSet, gather
    from preimage.reproduce import Reproduction, reproduce
    from preimage.states import States, capture, noise_floor, open_states, states_from
    from preimage.theory import (
        OptimiserOptions,
        TheoryReport,
        build_collision,
        check_analyticity,
        check_dichotomy,
        check_optimiser,
        check_symmetry,
        distance_to_collision,
        search_structure,
    )
    from preimage.training import LensOptions, Trajectory, TrajectoryOptions, train_lens, train_trajectory

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__)
