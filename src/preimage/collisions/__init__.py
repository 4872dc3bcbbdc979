"""Could two prompts have the same state? Every pair of a set, and every next token of a prefix."""

from preimage.collisions.auditing import find_collisions
from preimage.collisions.continuing import closest_prompts, scan_continuations
from preimage.collisions.options import CollisionOptions
from preimage.collisions.sweeping import sweep_lengths

__all__ = ["CollisionOptions", "closest_prompts", "find_collisions", "scan_continuations", "sweep_lengths"]
