"""Speed, as ratios measured within one run."""

from preimage.bench.capturing import bench_capture
from preimage.bench.inverting import bench_inversion, bench_throughput

__all__ = ["bench_capture", "bench_inversion", "bench_throughput"]
