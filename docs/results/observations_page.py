"""The tables and the figure of observations.md, from the raw json beside it.

python docs/results/observations_page.py          # tables on stdout, noise.svg into docs/results/figures
"""

import collections
import json
import statistics
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from geometry_page import table

from preimage.figures import save_figures

HERE = Path(__file__).parent
Cells = dict[str, list[dict[str, Any]]]


def read(name: str) -> Cells:
    """The rows of every cell of a raw file."""
    cells: Cells = collections.defaultdict(list)
    for line in (HERE / "raw" / name).read_text().splitlines():
        one = json.loads(line)
        cells[one["cell"]] += one.get("rows", [])
    return cells


def share(rows: list[dict[str, Any]], what: str = "right", first: int = 0) -> float:
    """The share of tokens read right, the first ``first`` positions left out."""
    return sum(row[what] for row in rows) / sum(row["tokens"] - first for row in rows)


def exact(rows: list[dict[str, Any]]) -> str:
    """Prompts read exactly, and the share of tokens where not all were."""
    right = sum(row["exact"] for row in rows)
    return f"{right} of {len(rows)}" + ("" if right == len(rows) else f" ({100 * share(rows):.2f} %)")


def by_layer(cells: Cells, names: dict[str, str], layers: tuple[str, ...]) -> None:
    """Prompts read exactly, a row a kind and a column a layer."""
    shown = [
        [words, *(exact(cells[f"{name}@{layer}"]) if f"{name}@{layer}" in cells else "" for layer in layers)]
        for name, words in names.items()
    ]
    table(["", *layers], shown)


def noise_table(cells: Cells) -> None:
    """Tokens read under noise, the first left out, and prompts read exactly."""
    names = sorted(name for name in cells if name.startswith("noise:"))
    shown = []
    for name in sorted(names, key=lambda one: (float(one[6:].split("@")[0]), int(one.split("@")[1]))):
        length, layer = name[6:].split("@")
        rows = cells[name]
        sure = sum(row["sure"] for row in rows)
        right = sum(row["sure_and_right"] for row in rows)
        shown.append([
            f"{100 * float(length):g} %", layer, f"{100 * share(rows, 'after_first', 1):.2f} %", exact(rows),
            f"{sure:,}", f"{100 * right / sure:.2f} %" if sure else "",
        ])  # fmt: skip
    table(["noise", "layer", "tokens after the first", "exact", "called sure", "of these right"], shown)


def noise(cells: Cells, margins: dict[str, Any]) -> None:
    """Tokens read under noise, and how many the paper's D/2 secures."""
    shares = sorted({float(name.split("@")[0][6:]) for name in cells if name.startswith("noise:")})
    rows, figure = [], go.Figure()
    for layer, colour in zip(("1", "15", "30"), ("#009E73", "#0072B2", "#D55E00"), strict=True):
        away = [one for at, some in margins["margins"][layer].items() for one in some if at != "0"]
        safe = [sum(one / 2 > share for one in away) / len(away) for share in shares]
        mine = [cells[f"noise:{share:g}@{layer}"] or cells[f"noise:{share}@{layer}"] for share in shares]
        read_ = [share(one, "after_first", 1) if one else None for one in mine]
        label = f"layer {layer}"
        figure.add_scatter(x=shares, y=read_, name=f"{label}, read", line={"color": colour})
        figure.add_scatter(
            x=[one / 2 for one in sorted(away)],
            y=[1 - index / len(away) for index in range(len(away))],
            name=f"{label}, secured by D/2", line={"color": colour, "dash": "dot"}, mode="lines",
        )  # fmt: skip
        rows.append([layer, f"{statistics.median(away) / 2:.3f}", *(
            f"{100 * one:.1f} % ({100 * sure:.0f} %)" if one is not None else ""
            for one, sure in zip(read_, safe, strict=True)
        )])  # fmt: skip
    table(["layer", "median D/2", *(f"{100 * one:g} %" for one in shares)], rows)
    figure.update_xaxes(
        title="length of the noise over that of the state", type="log", tickvals=(0.05, 0.1, 0.2, 0.5, 1, 2)
    )
    figure.update_yaxes(title="share of tokens after the first", range=[0, 1.02])
    save_figures({"noise": figure}, HERE / "figures", ("svg",))


def one_vector(cells: Cells) -> None:
    """Prompts found from one vector, by their length."""
    shown = []
    for name, rows in sorted(cells.items(), key=lambda one: one[0]):
        if name.startswith(("last:", "mean:")):
            seconds = [row["seconds"] for row in rows if row["exact"]]
            worst = f"{max(seconds):.0f}" if seconds else ""
            middle = f"{statistics.median(seconds):.1f}" if seconds else ""
            statuses = collections.Counter(row["status"] for row in rows)
            said = ", ".join(f"{count} {status}" for status, count in statuses.items())
            found = f"{sum(row['exact'] for row in rows)} of {len(rows)}"
            shown.append([name.split("@")[0].replace(":", ", "), found, said, middle, worst])
    table(["tokens", "found", "called", "median s of those found", "worst s"], shown)


KINDS = {
    "bf16-both": "half precision, int8 weights", "bf16-states": "half precision, int8 weights",
    "int8-weights": "half precision, int8 weights", "stored": "few bits", "keys": "caches",
    "values": "caches", "kv": "caches", "padded": "padded, permuted, shuffled",
    "permuted": "padded, permuted, shuffled", "shuffled": "padded, permuted, shuffled", "noise": "noise",
    "last": "one vector", "mean": "one vector",
}  # fmt: skip


def calibration(cells: Cells) -> None:
    """Of positions called at least .99 sure, how many are right."""
    kinds: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for name, rows in cells.items():
        if not name.startswith("hostile"):
            kinds[KINDS[name.split("@")[0].split(":")[0]]] += rows
    kinds["all"] = [row for rows in list(kinds.values()) for row in rows]
    shown = []
    for kind in dict.fromkeys([*KINDS.values(), "all"]):
        rows = kinds[kind]
        sure, right = sum(row["sure"] for row in rows), sum(row["sure_and_right"] for row in rows)
        shown.append(
            [kind, f"{sum(row['tokens'] for row in rows):,}", f"{sure:,}", f"{100 * right / sure:.2f} %"]
        )
    table(["", "positions", "called sure", "of these right"], shown)


def _by_layer(cell: tuple[str, Any]) -> tuple[str, int]:
    """Cells of a type together, by their layer."""
    name, _, layer = cell[0].partition("@")
    return name.partition(":")[2], int(layer)


def costs(cells: Cells) -> None:
    """What prompts cost, in forward passes of their tokens."""
    shown = [
        [", ".join((*name.partition("@")[0].split(":"), name.partition("@")[2])), exact(rows),
         f"{statistics.median(row['passes'] for row in rows):.1f}",
         f"{max(row['passes'] for row in rows):,.0f}"]
        for name, rows in sorted(cells.items(), key=_by_layer)
    ]  # fmt: skip
    table(["", "exact", "median passes", "worst"], shown)


def main() -> None:
    """All of it."""
    gpu, cpu = read("observations-h200.jsonl"), read("observations-cpu.jsonl")
    all_layers, some = ("1", "8", "15", "22", "30", "final"), ("1", "15", "30")
    halves = {"bf16-both": "read by the same bfloat16 model", "bf16-states": "read by the float32 model"}
    by_layer(gpu, halves, all_layers)
    by_layer(gpu, {f"stored:{kind}": kind for kind in ("fp16", "bf16", "int8", "fp8", "int4")}, some)
    noise_table(gpu)
    noise(gpu, json.loads((HERE / "raw" / "noise-margins.json").read_text()))
    costs({name: rows for name, rows in cpu.items() if rows})
    one_vector(gpu)
    calibration(gpu)


if __name__ == "__main__":
    main()
