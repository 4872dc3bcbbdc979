"""Result types, readable without torch."""

from preimage.results.collisions import (
    CollidingPair,
    CollisionAudit,
    Continuation,
    ContinuationScan,
    HardKind,
    LayerCollisions,
    Spacing,
)
from preimage.results.geometry import (
    Geometry,
    GeometrySweep,
    Interval,
    LayerGeometry,
    LayerSet,
    Setting,
    StepReport,
    Subsets,
    SweptGeometry,
)
from preimage.results.inversion import Inversion, Position, Positions, Status
from preimage.results.theory import TheoryReport, Verdict
from preimage.results.trajectory import Checkpoint, Drift, SmallestMargin, Trajectory

__all__ = [
    "Checkpoint",
    "CollidingPair",
    "CollisionAudit",
    "Continuation",
    "ContinuationScan",
    "Drift",
    "Geometry",
    "GeometrySweep",
    "HardKind",
    "Interval",
    "Inversion",
    "LayerCollisions",
    "LayerGeometry",
    "LayerSet",
    "Position",
    "Positions",
    "Setting",
    "SmallestMargin",
    "Spacing",
    "Status",
    "StepReport",
    "Subsets",
    "SweptGeometry",
    "TheoryReport",
    "Trajectory",
    "Verdict",
]
