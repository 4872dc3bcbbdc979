"""How far from a collision: margins, Lipschitz constants, quantisers, sweeps."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.geometry.grids import QuantiserGrid
    from preimage.geometry.measuring import measure_geometry
    from preimage.geometry.options import GeometryOptions, SweepOptions
    from preimage.geometry.propagating import propagate
    from preimage.geometry.quantiser import Quantiser
    from preimage.geometry.result import (
        Geometry,
        GeometrySweep,
        Interval,
        LayerGeometry,
        LayerSet,
        Setting,
        StepReport,
        Subsets,
        SweptGeometry,
    )
    from preimage.geometry.sweeping import measure_model, sweep_geometry

__getattr__, __dir__, __all__ = lazy_names(__name__)
