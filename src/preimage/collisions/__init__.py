"""Could two prompts have the same state? Every pair of a set, and every next token of a prefix."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.collisions.audit import find_collisions, sweep_lengths
    from preimage.collisions.continuations import closest_prompts, scan_continuations
    from preimage.collisions.options import CollisionOptions
    from preimage.collisions.result import (
        CollisionAudit,
        ComparedPair,
        Continuation,
        ContinuationScan,
        HardKind,
        LayerCollisions,
        Spacing,
    )
    from preimage.collisions.rounding import last_states, most_terms, rounding_bounds
    from preimage.collisions.structure import (
        UNEXPLAINED,
        Structure,
        absolute_positions,
        linear_biases,
        shortest_word,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)
