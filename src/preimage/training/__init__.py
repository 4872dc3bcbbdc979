"""Trainings: lenses, and small models that are measured as they learn."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.training.lenses import LensOptions, train_lens
    from preimage.training.trajectory import train_trajectory
    from preimage.training.trajectory_options import TrajectoryOptions, checkpoint_steps
    from preimage.training.trajectory_result import Checkpoint, Drift, SmallestMargin, Trajectory

__getattr__, __dir__, __all__ = lazy_names(__name__)
