"""Distances between states. Nobody else computes one."""

from preimage.distances.arithmetic import products
from preimage.distances.direct import norms, relative_error, row_distances
from preimage.distances.pairs import (
    Nearest,
    Pair,
    PairScan,
    closest_pairs,
    nearest_neighbors,
    nearest_neighbours,
)
from preimage.distances.prompt_distances import PromptDistances
from preimage.distances.rows import require_finite, same_rows
from preimage.distances.screen import EachTile, Screen, Tile, TileFound, here

__all__ = [
    "EachTile",
    "Nearest",
    "Pair",
    "PairScan",
    "PromptDistances",
    "Screen",
    "Tile",
    "TileFound",
    "closest_pairs",
    "here",
    "nearest_neighbors",
    "nearest_neighbours",
    "norms",
    "products",
    "relative_error",
    "require_finite",
    "row_distances",
    "same_rows",
]
