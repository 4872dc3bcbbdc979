"""Trainings: lenses, and small models that are measured as they learn."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.training.lenses import LensOptions as LensOptions
    from preimage.training.lenses import train_lens as train_lens
    from preimage.training.trajectory import train_trajectory as train_trajectory
    from preimage.training.trajectory_options import TrajectoryOptions as TrajectoryOptions
    from preimage.training.trajectory_options import checkpoint_steps as checkpoint_steps
    from preimage.training.trajectory_result import Checkpoint as Checkpoint
    from preimage.training.trajectory_result import Drift as Drift
    from preimage.training.trajectory_result import SmallestMargin as SmallestMargin
    from preimage.training.trajectory_result import Trajectory as Trajectory

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "lenses": "LensOptions train_lens",
        "trajectory": "train_trajectory",
        "trajectory_options": "TrajectoryOptions checkpoint_steps",
        "trajectory_result": "Checkpoint Drift SmallestMargin Trajectory",
    },
)
