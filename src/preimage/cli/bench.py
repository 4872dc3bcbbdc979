"""``preimage bench``: speed, as ratios measured in one run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from preimage.cli import arguments as arg
from preimage.cli.elsewhere import check_cluster
from preimage.cli.terminal import print_either, progress_bar

Layers = Annotated[str, typer.Option(help="Layers to invert from.")]
Prose = Annotated[int, typer.Option(help="Prompts of prose.")]
Code = Annotated[int, typer.Option(help="Prompts of code.")]
Random = Annotated[int, typer.Option(help="Prompts of random tokens.")]
Tokens = Annotated[int, typer.Option(help="Tokens a prompt.")]
Rounds = Annotated[int, typer.Option(help="Rounds; medians are reported.")]

app = typer.Typer(help="Measure speed, as ratios within one run.", no_args_is_help=True)


@app.command("capture")
def capture(
    model: arg.Model = "smollm2",
    count: Annotated[int, typer.Option(help="Prompts a round.")] = 16,
    length: Tokens = 64,
    rounds: Annotated[int, typer.Option(help="Rounds; the median ratio is reported.")] = 5,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in one pass, on both sides.")] = None,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """Capture of all layers against a plain transformers forward pass over the same prompts."""
    loaded, _ = arg.prepare(model, layers="all", dtype=dtype, device=device)
    from preimage.bench import bench_capture

    with progress_bar() as progress:
        result = bench_capture(
            loaded, count=count, length=length, rounds=rounds, batch_tokens=batch_tokens, progress=progress
        )
    print_either(
        json, "bench capture", result,
        f"fraction of forward: {result['fraction_of_forward']:.3f}",
        f"plain forward {result['forward_seconds']:.3f} s, capture {result['capture_seconds']:.3f} s, "
        f"{result['tokens']} tokens at {result['layers']} layers",
    )  # fmt: skip


@app.command("inversion")
def inversion(
    model: arg.Model = "smollm2",
    layers: Layers = "15,30",
    prose: Prose = 20,
    code: Code = 10,
    random: Random = 10,
    length: Tokens = 64,
    sipit_prompts: Annotated[int, typer.Option(help="Prompts also inverted by SIPIT; slow.")] = 1,
    sipit_length: Annotated[int, typer.Option(help="Tokens of those prompts.")] = 20,
    sipit_seconds: Annotated[float, typer.Option(help="Time limit of each SIPIT run.")] = 120.0,
    proposers: arg.Proposers = None,
    seed: arg.Seed = 0,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """Inversion against a plain forward pass and against SIPIT, on the same prompts in one run."""
    loaded, _ = arg.prepare(model, layers=layers, dtype=dtype, device=device)
    from preimage.bench import BenchPrompts, SipitRuns, bench_inversion

    with progress_bar() as progress:
        result = bench_inversion(
            loaded, layers, prompts=BenchPrompts(prose, code, random, length, seed), proposers=proposers,
            sipit=SipitRuns(sipit_prompts, sipit_length, sipit_seconds), progress=progress,
        )  # fmt: skip
    lines = []
    for layer, row in result["layers"].items():
        lines.append(
            f"{_exact(layer, row)}, median {row['ratio_to_forward']:.2f} forward passes "
            f"(worst {row['worst_ratio']:.1f}), set-up {row['setup_seconds']:.1f} s"
        )
        if "speedup_over_sipit" in row:
            lines.append(
                f"  {_times(row['speedup_over_sipit'])} SIPIT at its published cost, "
                f"{_times(row['speedup_over_cached_sipit'])} SIPIT on the prefix cache"
            )
    print_either(json, "bench inversion", result, *lines)


@app.command("throughput")
def throughput(
    model: arg.Model = "smollm2",
    layers: Layers = "15",
    prose: Prose = 400,
    code: Code = 300,
    random: Random = 300,
    length: Tokens = 64,
    rounds: Rounds = 3,
    proposers: arg.Proposers = None,
    seed: arg.Seed = 0,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """Inversion of many prompts at once against batched plain forward passes over them; for a GPU."""
    loaded, _ = arg.prepare(model, layers=layers, dtype=dtype, device=device)
    from preimage.bench import BenchPrompts, bench_throughput

    with progress_bar() as progress:
        result = bench_throughput(
            loaded, layers, prompts=BenchPrompts(prose, code, random, length, seed), rounds=rounds,
            proposers=proposers, progress=progress,
        )  # fmt: skip
    lines = [
        f"{_exact(layer, row)}, {row['misses']} misses, {row['fraction_of_forward']:.3f} of the throughput "
        f"of plain forward passes, set-up {row['setup_seconds']:.1f} s"
        for layer, row in result["layers"].items()
    ]
    print_either(json, "bench throughput", result, *lines)


@app.command("pairs")
def pairs(
    n: Annotated[int, typer.Option(help="Rows.")] = 20_000,
    d: Annotated[int, typer.Option(help="Width of a row.")] = 576,
    sets: Annotated[int, typer.Option(help="Sets of rows, one after another.")] = 1,
    norm: Annotated[float, typer.Option(help="Norm of a row, about.")] = 3000.0,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(help="Seed of the rows.")] = 0,
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """Certified minimum and nearest neighbours of all pairs against the bare matrix products."""
    from preimage.prompts.prompt_set import check_whole

    for name, value, at_least in (("n", n, 3), ("d", d, 1), ("sets", sets, 1), ("rounds", rounds, 1)):
        check_whole(name, value, at_least=at_least)
    from preimage.bench import bench_pairs

    with progress_bar() as progress:
        result = bench_pairs(
            n, d, sets=sets, norm=norm, rounds=rounds, device=device, seed=seed, progress=progress
        )
    print_either(
        json, "bench pairs", result,
        f"fraction of matmul: {result['fraction_of_matmul']:.3f}",
        f"{result['pairs']} pairs in {result['seconds']:.2f} s, {result['pairs_per_second']:.3g}/s",
        f"planted pairs found: {result['planted']['found']} of {result['planted']['sets']}",
    )  # fmt: skip


@app.command("geometry")
def geometry(
    model: arg.Model = "smollm2",
    layers: Annotated[str, typer.Option(help="Layers to measure.")] = "all",
    source: Annotated[str, typer.Option("--prompts", help="Source of the prompts.")] = "default",
    count: Annotated[int, typer.Option(help="Prompts.")] = 2000,
    length: Tokens = 32,
    rounds: Rounds = 5,
    seed: arg.Seed = 0,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """The exact co-Lipschitz constant of all pairs against the margin alone, on the same states."""
    loaded, _ = arg.prepare(model, layers=layers, dtype=dtype, device=device)
    from preimage.bench import bench_geometry

    with progress_bar() as progress:
        result = bench_geometry(
            loaded, layers, source=source, count=count, length=length, rounds=rounds, seed=seed,
            progress=progress,
        )  # fmt: skip
    ratios = f"{result['colipschitz_over_margin']:.2f}, worst {result['worst']:.2f}"
    print_either(json, "bench geometry", result, f"co-Lipschitz over margin: {ratios}")


@app.command("cluster")
def cluster(
    model: arg.Model = "smollm2",
    layers: Annotated[str, typer.Option(help="Layers to compare.")] = "all",
    source: Annotated[str, typer.Option("--prompts", help="Source of the prompts.")] = "default",
    count: Annotated[int, typer.Option(help="Prompts.")] = 2000,
    length: Tokens = 32,
    workers: Annotated[int, typer.Option(help="Workers that share this machine.")] = 2,
    alone: Annotated[bool, typer.Option(help="Also in one process, to compare with.")] = True,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "auto",
    json: arg.Json = False,
) -> None:
    """A collision search on a local Ray cluster against one process, and against what --plan says."""
    check_cluster("local", workers)
    loaded, _ = arg.prepare(model, layers=layers, dtype=dtype, device=device)
    from preimage.bench import bench_cluster

    with progress_bar() as progress:
        result = bench_cluster(
            loaded, count=count, length=length, source=source, layers=layers, workers=workers, alone=alone,
            progress=progress,
        )  # fmt: skip
    plan, peak = result["plan"], result["worker_peak_bytes"] / 2**30
    lines = [
        f"cluster {result['cluster_seconds']:.1f} s (planned {plan['cluster_seconds']:.1f})",
        f"a worker's memory: {peak:.2f} GiB at most (planned {plan['worker_bytes'] / 2**30:.2f})",
    ]
    if alone:
        seconds, planned = result["one_process_seconds"], plan["one_process_seconds"]
        lines.insert(0, f"overhead {result['overhead']:.1%}, same bytes: {result['same_bytes']}")
        lines.insert(1, f"one process {seconds:.1f} s (planned {planned:.1f})")
    print_either(json, "bench cluster", result, *lines)


def _exact(layer: str, row: dict[str, Any]) -> str:
    statuses = ", ".join(f"{number} {status}" for status, number in row["statuses"].items())
    return f"layer {layer}: {row['exact']} of {row['prompts']} exact ({statuses})"


def _times(speedup: float | None) -> str:
    return "not comparable (no token verified in time) with" if speedup is None else f"{speedup:.0f} times"
