"""How far from a collision: margins, Lipschitz constants, quantisers."""

from preimage.geometry.measuring import measure_geometry
from preimage.geometry.options import GeometryOptions
from preimage.geometry.quantisers import Grid, Quantiser

__all__ = ["GeometryOptions", "Grid", "Quantiser", "measure_geometry"]
