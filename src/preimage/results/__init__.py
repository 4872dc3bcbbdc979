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
from preimage.results.files import dumps, plain, read_json, write_json, write_table, write_text
from preimage.results.geometry import Geometry, LayerGeometry, LayerSet, StepReport
from preimage.results.inversion import Inversion, Position, Positions, Status
from preimage.results.run_folder import RunFolder
from preimage.results.theory import TheoryReport, Verdict

__all__ = [
    "CollidingPair",
    "CollisionAudit",
    "Continuation",
    "ContinuationScan",
    "Geometry",
    "HardKind",
    "Inversion",
    "LayerCollisions",
    "LayerGeometry",
    "LayerSet",
    "Position",
    "Positions",
    "RunFolder",
    "Spacing",
    "Status",
    "StepReport",
    "TheoryReport",
    "Verdict",
    "dumps",
    "plain",
    "read_json",
    "write_json",
    "write_table",
    "write_text",
]
