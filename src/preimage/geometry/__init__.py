"""How far from a collision: margins, Lipschitz constants, quantisers, sweeps, trainings."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.geometry.measuring import measure_geometry
    from preimage.geometry.options import GeometryOptions
    from preimage.geometry.propagating import propagate
    from preimage.geometry.quantisers import Grid, Quantiser
    from preimage.geometry.sweeping import measure_model, sweep_geometry
    from preimage.geometry.trajectory import train_trajectory
    from preimage.geometry.trajectory_options import TrajectoryOptions, checkpoint_steps

__all__ = [
    "GeometryOptions",
    "Grid",
    "Quantiser",
    "TrajectoryOptions",
    "checkpoint_steps",
    "measure_geometry",
    "measure_model",
    "propagate",
    "sweep_geometry",
    "train_trajectory",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GeometryOptions": "options",
        "Grid": "quantisers",
        "Quantiser": "quantisers",
        "TrajectoryOptions": "trajectory_options",
        "checkpoint_steps": "trajectory_options",
        "measure_geometry": "measuring",
        "measure_model": "sweeping",
        "propagate": "propagating",
        "sweep_geometry": "sweeping",
        "train_trajectory": "trajectory",
    },
)
