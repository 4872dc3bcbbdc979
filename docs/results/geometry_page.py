"""The tables and figures of geometry.md, from the raw json beside it.

python docs/results/geometry_page.py          # tables on stdout, figures as svg into docs/results/figures
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from preimage.figures import (
    family_figure,
    layer_figure,
    length_figure,
    near_collision_figure,
    quantised_figure,
    save_figures,
    trajectory_figure,
)
from preimage.geometry.result import Geometry
from preimage.training.result import Trajectory

HERE = Path(__file__).parent
LAYERS = ("1", "2", "8", "15", "22", "29", "30", "final")
DEPTHS = np.linspace(0.2, 1.0, 9)  # of layers 1..L; the final norm is left out


def read(name: str) -> dict[str, Any]:
    """One raw document, by today's names: ``lipschitz`` was ``upper`` when it was measured."""
    return json.loads((HERE / "raw" / name).read_text().replace('"upper":', '"lipschitz":'))


def table(head: list[str], rows: list[list[str]]) -> None:
    """Markdown on stdout."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")  # noqa: T201  # a script
    print()  # noqa: T201


def lengths(runs: dict[str, Geometry]) -> None:
    """Tables 1 and 2, figures 1, 2, 4 and 5."""
    by_length = {int(name.split("-")[0]): shape for name, shape in runs.items() if name.endswith("-layer")}
    rows = []
    for length, shape in by_length.items():
        last = shape.layers["final"]
        assert last.subsets is not None
        few = last.subsets.intervals
        cells = [str(length), f"{last.normalised_margin_quantile:.3f}"]
        cells += [f"{last.normalised_colipschitz_quantile:.4f}"]
        cells += [f"{last.normalised_colipschitz_quantile * length:.3f}"]
        margin, ratio = few["normalised_margin_quantile"], few["normalised_colipschitz_quantile"]
        cells += [f"{margin.mean:.3f} [{margin.low:.3f}, {margin.high:.3f}]"]
        scaled = [length * value for value in (ratio.mean, ratio.low, ratio.high)]
        cells += ["{:.3f} [{:.3f}, {:.3f}]".format(*scaled)]
        rows.append(cells)
    table(
        ["tokens", "margin", "co-Lipschitz", "co-Lipschitz x length", "margin, 2,000 prompts",
         "co-Lipschitz x length, 2,000 prompts"],
        rows,
    )  # fmt: skip
    shape = by_length[32]
    rows = []
    for layer, found in shape.layers.items():
        if str(layer) in LAYERS:
            rows.append([
                str(layer), f"{found.mean_norm:.3g}", f"{found.margin:.3g}", f"{found.margin_quantile:.3g}",
                f"{found.normalised_margin_quantile:.3f}", f"{found.colipschitz_quantile:.3g}",
                f"{found.normalised_colipschitz_quantile:.4f}", f"{found.distortion:.0f}",
                f"{found.anisotropy:.2f}", f"{found.intrinsic_dimension:.1f}",
            ])  # fmt: skip
    table(
        ["layer", "mean norm", "margin", "margin 1 %", "/ norm", "co-Lipschitz 1 %", "/ norm", "distortion",
         "anisotropy", "dimension"],
        rows,
    )  # fmt: skip
    figures = {
        "1-layers": layer_figure({f"{length} tokens": shape for length, shape in by_length.items()}),
        "2-lengths": length_figure({"smollm2": by_length}),
        "4-quantised": quantised_figure(shape),
        "5-near-collisions": near_collision_figure(shape),
    }
    save_figures(figures, HERE / "figures", ("svg",))


def collisions(runs: dict[str, Geometry]) -> None:
    """Equal states by layer, number of bits and way of storing."""
    kept = {name: shape for name, shape in runs.items() if name.split("-")[0] in ("8", "32", "128")}
    head = ["layer", *(f"{name}, {bits} bit" for name in kept for bits in (8, 4))]
    rows = []
    for layer in LAYERS:
        row = [layer]
        for shape in kept.values():
            for bits in (8, 4):
                found = shape.quantised[bits].layers[layer if layer == "final" else int(layer)]
                row.append(f"{found.collisions:,}")
        rows.append(row)
    table(head, rows)
    worst = {
        name: max(found.collisions for layer, found in shape.layers.items() if layer != 0)
        for name, shape in runs.items()
    }
    near = {
        name: max(max(found.near_collisions.values()) for layer, found in shape.layers.items() if layer != 0)
        for name, shape in runs.items()
    }
    print("most collisions above layer 0, full precision:", worst)  # noqa: T201
    print("largest share of near-collisions above layer 0, full precision:", near)  # noqa: T201
    report = runs["32-layer"].quantised[4].layers[15].quantised
    print("32 tokens, layer 15, 4 bit:", report, "\n")  # noqa: T201


def families(runs: dict[str, Trajectory]) -> None:
    """Figure 3, the trajectories, and what tells the curves apart."""
    ends = {name: run.checkpoints[-1] for name, run in runs.items()}
    rows = []
    for size, family in itertools.product(("small", "medium", "large"), ("gpt2", "llama")):
        some = [name for name in runs if name.startswith(f"{family}-{size}-")]
        cells = [f"{family} {size}", f"{runs[some[0]].model['parameters'] / 1e6:.1f} M"]
        cells.append(spread([ends[name].held_out_loss for name in some], 2))
        for quantity in ("normalised_margin_quantile", "normalised_colipschitz_quantile"):
            places = 3 if "margin" in quantity else 4
            cells.append(spread([getattr(ends[name].last, quantity) for name in some], places))
        for moment in (0, 5, -1):
            values = [runs[n].checkpoints[moment].smallest("normalised_margin_quantile")[1] for n in some]
            cells.append(spread(values, 3))
        drift = [runs[name].drift("normalised_margin_quantile").second_half or 0.0 for name in some]
        cells.append(spread([100 * value for value in drift], 0) + " %")
        rows.append(cells)
    steps = [at.step for at in next(iter(runs.values())).checkpoints]
    half = next(iter(runs.values())).drift("margin").half_step
    table(
        ["model", "parameters", "held-out loss", "last layer: margin", "co-Lipschitz",
         f"smallest over layers: step {steps[0]}", f"step {steps[5]}", f"step {steps[-1]}",
         f"change since step {half}"],
        rows,
    )  # fmt: skip
    curves = {name: curve(end.geometry) for name, end in ends.items()}
    pairs = {"same family and size": [], "same size, other family": [], "same family, other size": []}
    for one, other in itertools.combinations(curves, 2):
        (family, size, _), (second, third, _) = one.split("-"), other.split("-")
        apart = float(np.sqrt(np.mean((curves[one] - curves[other]) ** 2)))
        if family == second:
            pairs["same family and size" if size == third else "same family, other size"].append(apart)
        elif size == third:
            pairs["same size, other family"].append(apart)
    table(
        ["curves of", "pairs", "root mean square of the log ratio, mean", "smallest", "largest"],
        [
            [name, str(len(v)), f"{np.mean(v):.3f}", f"{min(v):.3f}", f"{max(v):.3f}"]
            for name, v in pairs.items()
        ],
    )
    for size in ("small", "medium", "large"):
        print(f"families of size {size}: permutation p = {permutation(curves, size):.2f}")  # noqa: T201
    shown = {name: end.geometry for name, end in ends.items() if name.endswith("-0")}
    seeds = {name: run for name, run in runs.items() if name.endswith("-0")}
    figures = {"3-families": family_figure(shown), "trajectory": trajectory_figure(seeds)}
    save_figures(figures, HERE / "figures", ("svg",))


def curve(shape: Geometry) -> np.ndarray:
    """The logarithm of the normalised margin quantile by depth, at the same depths for every model."""
    blocks = [found for layer, found in shape.layers.items() if layer not in (0, "final")]
    values = [math.log(found.normalised_margin_quantile) for found in blocks]
    return np.interp(DEPTHS, np.linspace(1 / len(blocks), 1, len(blocks)), values)


def permutation(curves: dict[str, np.ndarray], size: str) -> float:
    """How often a random half against the other is as far apart as the two families are."""
    names = sorted(name for name in curves if f"-{size}-" in name)
    rows = np.stack([curves[name] for name in names])

    def apart(chosen: tuple[int, ...]) -> float:
        rest = [i for i in range(len(names)) if i not in chosen]
        return float(np.sqrt(np.mean((rows[list(chosen)].mean(0) - rows[rest].mean(0)) ** 2)))

    halves = list(itertools.combinations(range(len(names)), len(names) // 2))
    true = apart(tuple(i for i, name in enumerate(names) if name.startswith("gpt2")))
    return sum(apart(half) >= true * (1 - 1e-9) for half in halves) / len(halves)


def spread(values: list[float], places: int) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{np.mean(values):.{places}f} ± {np.std(values, ddof=1):.{places}f}"


def main() -> None:
    """All of it."""
    measured = {name: Geometry.from_dict(run) for name, run in read("geometry-h200.json")["runs"].items()}
    lengths(measured)
    collisions(measured)
    families({name: Trajectory.from_dict(run) for name, run in read("families-h200.json")["runs"].items()})


if __name__ == "__main__":
    main()
