"""Inversion: which prompt made these states?"""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.inversion.inverting import invert as invert
    from preimage.inversion.options import METHODS as METHODS
    from preimage.inversion.options import InvertOptions as InvertOptions
    from preimage.inversion.options import Method as Method
    from preimage.inversion.result import Inversion as Inversion
    from preimage.inversion.result import Position as Position
    from preimage.inversion.result import Status as Status
    from preimage.inversion.result import VerifiedPositions as VerifiedPositions

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "inverting": "invert",
        "options": "METHODS InvertOptions Method",
        "result": "Inversion Position Status VerifiedPositions",
    },
)
