"""How far from a collision: margins, Lipschitz constants, quantisers, sweeps."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.geometry.measuring import measure_geometry as measure_geometry
    from preimage.geometry.options import GeometryOptions as GeometryOptions
    from preimage.geometry.options import SweepOptions as SweepOptions
    from preimage.geometry.propagating import propagate as propagate
    from preimage.geometry.quantisers import Quantiser as Quantiser
    from preimage.geometry.quantisers import QuantiserGrid as QuantiserGrid
    from preimage.geometry.result import Geometry as Geometry
    from preimage.geometry.result import GeometrySweep as GeometrySweep
    from preimage.geometry.result import Interval as Interval
    from preimage.geometry.result import LayerGeometry as LayerGeometry
    from preimage.geometry.result import LayerSet as LayerSet
    from preimage.geometry.result import Setting as Setting
    from preimage.geometry.result import StepReport as StepReport
    from preimage.geometry.result import Subsets as Subsets
    from preimage.geometry.result import SweptGeometry as SweptGeometry
    from preimage.geometry.sweeping import measure_model as measure_model
    from preimage.geometry.sweeping import sweep_geometry as sweep_geometry

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "measuring": "measure_geometry",
        "options": "GeometryOptions SweepOptions",
        "propagating": "propagate",
        "quantisers": "Quantiser QuantiserGrid",
        "result": "Geometry GeometrySweep Interval LayerGeometry LayerSet Setting StepReport Subsets "
        "SweptGeometry",
        "sweeping": "measure_model sweep_geometry",
    },
)
