"""Could two prompts have the same state? Every pair of a set, and every next token of a prefix."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.collisions.audit import find_collisions as find_collisions
    from preimage.collisions.audit import sweep_lengths as sweep_lengths
    from preimage.collisions.continuations import closest_prompts as closest_prompts
    from preimage.collisions.continuations import scan_continuations as scan_continuations
    from preimage.collisions.options import CollisionOptions as CollisionOptions
    from preimage.collisions.result import CollisionAudit as CollisionAudit
    from preimage.collisions.result import ComparedPair as ComparedPair
    from preimage.collisions.result import Continuation as Continuation
    from preimage.collisions.result import ContinuationScan as ContinuationScan
    from preimage.collisions.result import HardKind as HardKind
    from preimage.collisions.result import LayerCollisions as LayerCollisions
    from preimage.collisions.result import Spacing as Spacing
    from preimage.collisions.rounding import last_states as last_states
    from preimage.collisions.rounding import most_terms as most_terms
    from preimage.collisions.rounding import rounding_bounds as rounding_bounds
    from preimage.collisions.structure import UNEXPLAINED as UNEXPLAINED
    from preimage.collisions.structure import Structure as Structure
    from preimage.collisions.structure import absolute_positions as absolute_positions
    from preimage.collisions.structure import linear_biases as linear_biases
    from preimage.collisions.structure import shortest_word as shortest_word

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "audit": "find_collisions sweep_lengths",
        "continuations": "closest_prompts scan_continuations",
        "options": "CollisionOptions",
        "result": "ComparedPair CollisionAudit Continuation ContinuationScan HardKind LayerCollisions "
        "Spacing",
        "rounding": "last_states most_terms rounding_bounds",
        "structure": "UNEXPLAINED Structure absolute_positions linear_biases shortest_word",
    },
)
