"""Speed, as ratios measured within one run."""

from preimage.bench.capturing import bench_capture

__all__ = ["bench_capture"]
