"""Work on many machines: a Ray cluster, which pieces go where, and what is done about lost workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preimage.lazy import lazy_names

if TYPE_CHECKING:
    from preimage.cluster.engine import Cluster, WorkerStats
    from preimage.cluster.schedule import Schedule
    from preimage.cluster.simulation import Machine, SimulatedRun, simulate

__getattr__, __dir__, __all__ = lazy_names(__name__)
