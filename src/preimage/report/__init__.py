"""Figures, drawn from results."""

from preimage.report.margins import margin_figure
from preimage.report.spacing import spacing_figure

__all__ = ["margin_figure", "spacing_figure"]
