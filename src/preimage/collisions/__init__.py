"""Could two prompts have the same state? Every pair of a set, and every next token of a prefix."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.collisions.auditing import find_collisions as find_collisions
    from preimage.collisions.continuing import closest_prompts as closest_prompts
    from preimage.collisions.continuing import scan_continuations as scan_continuations
    from preimage.collisions.options import CollisionOptions as CollisionOptions
    from preimage.collisions.result import CollidingPair as CollidingPair
    from preimage.collisions.result import CollisionAudit as CollisionAudit
    from preimage.collisions.result import Continuation as Continuation
    from preimage.collisions.result import ContinuationScan as ContinuationScan
    from preimage.collisions.result import HardKind as HardKind
    from preimage.collisions.result import LayerCollisions as LayerCollisions
    from preimage.collisions.result import Spacing as Spacing
    from preimage.collisions.sweeping import sweep_lengths as sweep_lengths

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "auditing": "find_collisions",
        "continuing": "closest_prompts scan_continuations",
        "options": "CollisionOptions",
        "result": "CollidingPair CollisionAudit Continuation ContinuationScan HardKind LayerCollisions "
        "Spacing",
        "sweeping": "sweep_lengths",
    },
)
