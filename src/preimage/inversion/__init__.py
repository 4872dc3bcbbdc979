"""Inversion: which prompt made these states?"""

from preimage.inversion.inverting import invert
from preimage.inversion.options import METHODS, InvertOptions, Method

__all__ = ["METHODS", "InvertOptions", "Method", "invert"]
