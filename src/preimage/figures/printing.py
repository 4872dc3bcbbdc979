"""Figures as files: pages that need nothing else, and svg or pdf for print."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from preimage.errors import OptionError, first_line
from preimage.figures.style import laid_out
from preimage.storage import Place, place_of, write_bytes, write_text

FORMATS = ("html", "svg", "pdf")


def parse_formats(given: str) -> tuple[str, ...]:
    """Formats from a list such as ``html,svg``."""
    wanted = tuple(part.strip() for part in given.split(","))
    unknown = [part for part in wanted if part not in FORMATS]
    if unknown:
        raise OptionError(f"Figures cannot be written as {unknown[0]!r}.", f"Use {', '.join(FORMATS)}.")
    return wanted


def save_figures(
    figures: Mapping[str, go.Figure], folder: str | Place, formats: Sequence[str] = ("html",), about: str = ""
) -> None:
    """Write every figure, by its name, in every format, in a folder or at an address.

    ``about``: who made it, behind every title (:func:`preimage.figures.made_by`).
    """
    place = place_of(folder)
    for name, given in figures.items():
        figure = laid_out(given, about)
        for kind in formats:
            path = place / f"{name}.{kind}"
            if kind == "html":
                write_text(path, figure.to_html(include_plotlyjs=True, div_id=name))
            else:
                image = _printed(figure, kind)
                write_bytes(path, _same_ids(image) if kind == "svg" else image)


def _printed(figure: go.Figure, kind: str) -> bytes:
    """By kaleido, which draws in a browser."""
    logging.getLogger("choreographer").setLevel(logging.CRITICAL)  # it logs what it recovers from
    try:
        image: bytes = figure.to_image(format=kind, width=1200, height=figure.layout.height)
    except Exception as error:  # kaleido, its browser and plotly each have their own
        raise OptionError(
            f"A figure cannot be drawn as {kind}: {first_line(error)}",
            "Install preimage[print] and Chrome or Chromium, or write html.",
        ) from error
    return image


def _same_ids(image: bytes) -> bytes:
    """An svg with numbers in place of plotly's random ids: the same figure, the same file."""
    drawn = dict.fromkeys(re.findall(rb"\b(?:defs-|trace)([0-9a-f]{6})\b", image))
    for number, one in enumerate(drawn):
        image = re.sub(rb"(?<!#)" + one, b"%06d" % number, image)
    return image
