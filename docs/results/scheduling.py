"""A million prompts at 80 layers on 1 to 512 GPUs, simulated: how busy these are, and what losses cost.

    python docs/results/scheduling.py

writes scheduling.md and raw/scheduling.json beside this file, in half a minute of one core. No GPU and no
Ray: the driver's own schedule is asked by simulated workers (preimage.cluster.simulate). Every number it
rests on is an option; --help lists them.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from preimage.cluster import Machine, simulate
from preimage.devices import BATCH_TOKENS
from preimage.distances.screen import TILE, tile_count

HERE = Path(__file__).parent
GPUS = (1, 8, 64, 512)
HOURS = (math.inf, 24.0, 4.0, 1.0)  # to a worker's loss, on average
LIBRARY_TILES = 16  # that a worker is given at a time (collisions/errands.py)
MEASURED_PAIRS, MEASURED_WIDTH = 34.4e9, 1152  # of the product that --screen-seconds is about


@dataclass(frozen=True)
class Stage:
    """Work whose pieces wait for nothing but each other; their seconds on one GPU."""

    name: str
    pieces: list[float]
    ready: bool  # whether workers are there from a stage before


def cut(whole: float, piece: float) -> list[float]:
    """So many seconds in pieces of so many, the last one shorter."""
    full = int(whole / piece)
    return [piece] * full + ([whole - full * piece] if whole > full * piece else [])


def stages(given: argparse.Namespace) -> list[Stage]:
    """The stages of an audit, each in the pieces that workers are given."""
    a_token = 2 * given.parameters / given.flops
    capture = cut(given.prompts * given.tokens * a_token, given.piece_tokens * a_token)
    a_pair = given.screen_seconds / MEASURED_PAIRS * given.width / MEASURED_WIDTH
    layer = given.prompts * (given.prompts - 1) / 2 * a_pair
    tiles = tile_count(given.prompts, "cuda")
    return [
        Stage("capture, workers started for it", capture, ready=False),
        Stage("capture, workers there", capture, ready=True),
        Stage("pairs, a layer a piece", [layer] * given.layers, ready=True),
        *(
            Stage(f"pairs, {some} tiles a piece", cut(layer, layer / tiles * some) * given.layers, ready=True)
            for some in given.tiles
        ),
    ]


def measured(stage: Stage, gpus: int, hours: float, given: argparse.Namespace) -> dict[str, Any]:
    """One stage on so many GPUs: means over seeds; one run where nothing is random."""
    machine = Machine(start_up=given.start_up, mean_seconds_to_loss=3600 * hours, ready=stage.ready)
    runs = [
        simulate(
            stage.pieces, [machine] * gpus, latency=given.latency, replacement=given.replacement, seed=seed
        )
        for seed in range(1 if hours == math.inf else given.seeds)
    ]
    work = sum(stage.pieces)
    makespans = [run.makespan for run in runs]
    return {
        "stage": stage.name,
        "gpus": gpus,
        "hours_to_loss": None if hours == math.inf else hours,
        "pieces": len(stage.pieces),
        "work_seconds": work,
        "longest_piece_seconds": max(stage.pieces),
        "runs": len(runs),
        "makespan_seconds": fmean(makespans),
        "makespan_worst_seconds": max(makespans),
        "efficiency": fmean(work / gpus / makespan for makespan in makespans),
        "efficiency_worst": work / gpus / max(makespans),
        "losses": fmean(run.losses for run in runs),
        "repeated_pieces": fmean(run.repeated for run in runs),
        "repeated_share": fmean(run.wasted for run in runs) / work,
        "unfinished_pieces": sum(len(stage.pieces) - run.done for run in runs),
        "hopeless_runs": sum(run.hopeless for run in runs),
    }


def duration(seconds: float) -> str:
    """Seconds in the unit people would use."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def share(part: float) -> str:
    """A share in per cent, or nothing."""
    return f"{100 * part:.2g} %" if part else "0"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def assumptions(found: dict[str, Any]) -> list[str]:
    """The table of what the simulation rests on."""
    assumed = found["assumptions"]
    return table(
        ["what", "value", "from"],
        [
            ["parameters", f"{assumed['parameters'] / 1e9:g} billion", "chosen"],
            ["width of a state", f"{assumed['width']:,}", "chosen"],
            [
                "capture",
                f"{assumed['flops'] / 1e12:g} TFLOP/s, 2 x parameters flops a token",
                "an H200 in bf16, effective",
            ],
            [
                "all pairs",
                f"{assumed['screen_seconds']} s for {MEASURED_PAIRS / 1e9:g} billion pairs at width "
                f"{MEASURED_WIDTH:,}, in proportion to pairs and width",
                "an H200: bf16 product and row minima",
            ],
            ["a capture piece", f"{assumed['piece_tokens']:,} tokens", "the library's pass on a GPU"],
            [
                "tiles",
                f"{found['tile']:,} rows by as many, {' or '.join(map(str, assumed['tiles']))} a piece",
                f"the library's, on a GPU; it gives {LIBRARY_TILES} a piece",
            ],
            [
                "start of a worker",
                f"{assumed['start_up']:g} s",
                f"{2 * assumed['parameters'] / 1e9:.0f} GB of weights in bf16, at about 1.5 GB/s",
            ],
            ["replacement of a lost one", f"{assumed['replacement']:g} s before that", "chosen"],
            [
                "driver",
                f"{1e3 * assumed['latency']:g} ms a message, one after another",
                "chosen; about what Ray takes with the driver on one busy core",
            ],
            ["losses", "exponential, each worker on its own", f"means of {assumed['seeds']} seeds"],
        ],
    )


def pieces(found: dict[str, Any]) -> list[str]:
    """The table of what is handed out in each stage."""
    rows = []
    for case in found["cases"]:
        if (case["gpus"], case["hours_to_loss"]) == (1, None):
            longest = case["longest_piece_seconds"]
            served = longest / found["assumptions"]["latency"]
            cells = [f"{case['pieces']:,}", f"{longest:.3g} s", duration(case["work_seconds"])]
            rows.append([case["stage"], *cells, f"{served:,.0f}"])
    return table(["stage", "pieces", "one takes", "all, on one GPU", "GPUs a driver serves"], rows)


def by_losses(found: dict[str, Any], field: str, form: Callable[[float], str]) -> list[str]:
    """The table of one result: stages and GPUs below one another, losses side by side."""
    rows: dict[tuple[str, int], list[str]] = {}
    for case in found["cases"]:
        rows.setdefault((case["stage"], case["gpus"]), []).append(form(case[field]))
    head = ["none" if hours == math.inf else f"{hours:g} h" for hours in HOURS]
    return table(["stage", "GPUs", *head], [[name, str(gpus), *row] for (name, gpus), row in rows.items()])


def page(found: dict[str, Any]) -> str:
    """The page, from what was simulated alone."""
    assumed, cases = found["assumptions"], found["cases"]
    left = sum(case["unfinished_pieces"] for case in cases)
    runs = sum(case["runs"] for case in cases)
    lines = [
        "# Many GPUs, simulated",
        "",
        f"An audit of {assumed['prompts']:,} prompts of {assumed['tokens']} tokens at {assumed['layers']} "
        "layers. The driver's own schedule (`preimage.cluster.Schedule`) is asked by simulated workers, one "
        "on each GPU. This page and [its numbers](raw/scheduling.json) are written by",
        "",
        "    python docs/results/scheduling.py",
        "",
        "Nothing here was measured on so many GPUs: it says what the schedule makes of the rates below.",
        "",
        "## Assumed",
        "",
        *assumptions(found),
        "",
        "Not in it: reading and writing. States of one layer are "
        f"{2 * assumed['prompts'] * assumed['width'] / 1e9:.1f} GB in bf16; who compares a layer reads them "
        "once, and where tiles are handed out every worker reads every layer it gets tiles of.",
        "",
        "## Pieces",
        "",
        "A driver hands out one piece a message, so that the length of a piece over that of a message is how "
        "many GPUs it can keep at work.",
        "",
        *pieces(found),
        "",
        "## Time",
        "",
        "From the beginning to the last piece, by the mean time to the loss of a worker.",
        "",
        *by_losses(found, "makespan_seconds", duration),
        "",
        "## Efficiency",
        "",
        "Work over GPUs and time: 1 is every GPU at work on pieces that are kept, all the time.",
        "",
        *by_losses(found, "efficiency", "{:.3f}".format),
        "",
        "## Work done again",
        "",
        "What had gone into pieces that were lost with their worker, of all work.",
        "",
        *by_losses(found, "repeated_share", share),
        "",
        f"{runs:,} runs; pieces left unfinished in them: {left}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Simulate everything, write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--parameters", type=float, default=70e9)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--flops", type=float, default=4e14, help="a second, in capture")
    parser.add_argument("--screen-seconds", type=float, default=0.15, help="for 34.4e9 pairs of width 1,152")
    parser.add_argument("--piece-tokens", type=int, default=BATCH_TOKENS["cuda"])
    parser.add_argument("--tiles", type=int, nargs="+", default=[LIBRARY_TILES, 64, 256], help="a piece")
    parser.add_argument("--start-up", type=float, default=100.0, help="seconds")
    parser.add_argument("--replacement", type=float, default=60.0, help="seconds")
    parser.add_argument("--latency", type=float, default=2.5e-3, help="seconds of the driver for a message")
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    cases = [
        measured(stage, gpus, hours, given) for stage in stages(given) for gpus in GPUS for hours in HOURS
    ]
    found = {"assumptions": vars(given), "tile": TILE["cuda"], "cases": cases}
    (HERE / "raw" / "scheduling.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "scheduling.md").write_text(page(found))


if __name__ == "__main__":
    main()
