"""Speed, as ratios measured within one run."""

from preimage.bench.capturing import bench_capture
from preimage.bench.clustering import bench_cluster
from preimage.bench.inverting import BenchPrompts, SipitRuns, bench_inversion, bench_throughput
from preimage.bench.measuring import bench_geometry
from preimage.bench.pairing import bench_pairs

__all__ = [
    "BenchPrompts",
    "SipitRuns",
    "bench_capture",
    "bench_cluster",
    "bench_geometry",
    "bench_inversion",
    "bench_pairs",
    "bench_throughput",
]
