"""Figures, drawn from results."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.figures.geometry import (
        family_figure,
        layer_figure,
        length_figure,
        near_collision_figure,
        quantised_figure,
    )
    from preimage.figures.leak import defence_figure, leak_map
    from preimage.figures.margins import distance_figure, margin_figure
    from preimage.figures.printing import FORMATS, parse_formats, save_figures
    from preimage.figures.spacing import (
        continuation_figure,
        margins_figure,
        near_pairs_figure,
        spacing_figure,
    )
    from preimage.figures.style import PALETTE, made_by, made_now, named
    from preimage.figures.trajectory import trajectory_figure

__getattr__, __dir__, __all__ = lazy_names(__name__)
