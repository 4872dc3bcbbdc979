"""Distances between states. Nobody else computes one."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.distances.arithmetic import products
    from preimage.distances.direct import city_block, norms, relative_error, row_distances
    from preimage.distances.pairs import (
        Pair,
        closest_pairs,
        count_below,
        distance_bounds,
        distance_distribution,
        find_closest,
        nearest_neighbors,
        nearest_neighbours,
        some_near,
    )
    from preimage.distances.prompt_distances import PromptDistances
    from preimage.distances.rows import count_equal_pairs, equal_row_groups, require_finite, same_rows
    from preimage.distances.scan import Nearest, PairScan
    from preimage.distances.screen import EachTile, Screen, Tile, TileMinima, here, tile_count

__getattr__, __dir__, __all__ = lazy_names(__name__)
