"""Could two prompts have the same state? Every pair of a set, and every next token of a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.collisions.auditing import find_collisions
    from preimage.collisions.continuing import closest_prompts, scan_continuations
    from preimage.collisions.options import CollisionOptions
    from preimage.collisions.sweeping import sweep_lengths

_HOMES = {
    "CollisionOptions": "options",
    "closest_prompts": "continuing",
    "find_collisions": "auditing",
    "scan_continuations": "continuing",
    "sweep_lengths": "sweeping",
}

__all__ = ["CollisionOptions", "closest_prompts", "find_collisions", "scan_continuations", "sweep_lengths"]


__getattr__, __dir__ = lazy_names(__name__, _HOMES)
