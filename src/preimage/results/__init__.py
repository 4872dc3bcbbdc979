"""Result types and files. Nobody else writes a result."""

from preimage.results.collisions import (
    CollidingPair,
    CollisionAudit,
    Continuation,
    ContinuationScan,
    HardKind,
    LayerCollisions,
    Spacing,
)
from preimage.results.files import (
    dumps,
    plain,
    read_json,
    write_bytes,
    write_json,
    write_table,
    write_tensors,
    write_text,
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
from preimage.results.run_folder import RunFolder
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
    "RunFolder",
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
    "dumps",
    "plain",
    "read_json",
    "write_bytes",
    "write_json",
    "write_table",
    "write_tensors",
    "write_text",
]
