"""Inversion: which prompt made these states?"""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.inversion.inverting import invert
    from preimage.inversion.options import METHODS, InvertOptions, Method

__all__ = ["METHODS", "InvertOptions", "Method", "invert"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"METHODS": "options", "InvertOptions": "options", "Method": "options", "invert": "inverting"},
)
