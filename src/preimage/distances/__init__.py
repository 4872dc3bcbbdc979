"""Distances between states. Nobody else computes one."""

from preimage.distances.direct import norms, row_distances

__all__ = ["norms", "row_distances"]
