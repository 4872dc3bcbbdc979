"""Figures, drawn from results."""

from preimage.report.margins import margin_figure

__all__ = ["margin_figure"]
