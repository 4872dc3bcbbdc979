"""What long work would cost, before any of it is done."""

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.planning.calibration import Calibration, calibrate
    from preimage.planning.plans import (
        plan_capture,
        plan_collisions,
        plan_continuations,
        plan_geometry,
        plan_inversion,
    )
    from preimage.planning.result import Stage, WorkPlan

__getattr__, __dir__, __all__ = lazy_names(__name__)
