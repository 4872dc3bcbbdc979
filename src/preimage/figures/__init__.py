"""Figures, drawn from results."""

from preimage.figures.geometry import (
    family_figure,
    layer_figure,
    length_figure,
    near_collision_figure,
    quantised_figure,
)
from preimage.figures.margins import margin_figure
from preimage.figures.printing import FORMATS, parse_formats, save_figures
from preimage.figures.spacing import spacing_figure
from preimage.figures.trajectory import trajectory_figure

__all__ = [
    "FORMATS",
    "family_figure",
    "layer_figure",
    "length_figure",
    "margin_figure",
    "near_collision_figure",
    "parse_formats",
    "quantised_figure",
    "save_figures",
    "spacing_figure",
    "trajectory_figure",
]
