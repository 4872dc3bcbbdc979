"""Reports: one html page that holds all it shows and asks for nothing, and the same page as a pdf."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.report.opened import Opened
    from preimage.report.page import Page, Section, render, save_page
    from preimage.report.parts import (
        Bullets,
        Cell,
        Column,
        Details,
        Difference,
        Facts,
        Figure,
        Heading,
        Notice,
        Paragraph,
        Part,
        Preformatted,
        Table,
        Token,
        Tokens,
        Tone,
    )
    from preimage.report.plots import PALETTE
    from preimage.report.printing import print_pdf
    from preimage.report.registry import KINDS, Kind, run_page
    from preimage.report.runs import open_runs

__getattr__, __dir__, __all__ = lazy_names(__name__)
