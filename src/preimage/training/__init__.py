"""Trainings: lenses, and small models that are measured as they learn."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.training.lens_text import texts_written_by
    from preimage.training.lenses import TrainedLens, is_worth_training, train_lens, training_tokens
    from preimage.training.options import LensOptions, TrajectoryOptions, checkpoint_steps
    from preimage.training.result import Checkpoint, Drift, SmallestMargin, Trajectory
    from preimage.training.trajectory import train_trajectory

__getattr__, __dir__, __all__ = lazy_names(__name__)
