"""The tables and the figure of leak.md, from the raw json beside it.

python docs/results/leak_page.py                       # tables on stdout, defences.svg into figures
python docs/results/leak_page.py RUN leak-cpu.json     # first makes that raw json of a run folder
"""

import json
import re
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from geometry_page import table

from preimage.figures import save_figures
from preimage.leak import LeakAudit
from preimage.leak.result import LeakCell, Utility
from preimage.leak.verdict import break_even, curves

HERE = Path(__file__).parent
ORDERS = ("permuted", "rotated", "shuffled")
COLOURS = ("#009E73", "#0072B2", "#D55E00")


def read(name: str) -> dict[str, Any]:
    """One raw document."""
    return json.loads((HERE / "raw" / name).read_text())


def keep(run: Path, name: str) -> None:
    """The results of a run folder and where they come from, as raw json; its command is in leak.md."""
    plan = json.loads((run / "run.json").read_text())
    made = json.loads((run / "record.jsonl").read_text().splitlines()[0])
    began = datetime.fromisoformat(made["date"]).timestamp()
    made["seconds"] = round((run / "run.json").stat().st_mtime - began)
    document = {"record": made, "audit": plan["results"]}
    (HERE / "raw" / name).write_text(json.dumps(document))


def shown(cell: LeakCell | None) -> str:
    """Prompts read whole, the share of tokens where not all were, and what was read of others in haste."""
    if cell is None or not cell.tried:
        return ""
    whole, sample = sum(one.exact for one in cell.sample), len(cell.sample)
    text = f"{whole} of {sample}" + ("" if whole == sample else f" ({100 * cell.tokens:.1f} %)")
    if any(one.hurried for one in cell.sample):
        return f"{text}, in haste"
    return text + (f"; {cell.hurried} in haste: {100 * cell.in_haste:.0f} %" if cell.hurried else "")


def standard(audit: LeakAudit) -> None:
    """Every exposure at every layer: what was read, and what that took."""
    layers = audit.layers
    table(
        ["", *map(str, layers)],
        [[name, *(shown(audit.at(name, layer)) for layer in layers)] for name in audit.exposures],
    )
    cost = []
    for name in audit.exposures:
        cells = [cell for layer in layers if (cell := audit.at(name, layer)) is not None and cell.tried]
        sure, right = (sum(getattr(one, what) for cell in cells for one in cell.prompts)
                       for what in ("sure", "sure_right"))  # fmt: skip
        cost.append([
            name, f"{min(c.passes for c in cells):.1f} to {max(c.passes for c in cells):.1f}",
            f"{min(c.seconds_a_prompt for c in cells):.2g} to {max(c.seconds_a_prompt for c in cells):.2g}",
            f"{sure:,}", f"{100 * right / sure:.2f} %" if sure else "", str(sum(c.wrong for c in cells)),
        ])  # fmt: skip
    head = ["", "passes", "seconds a prompt", "tokens called sure", "of these right", "recovered, and wrong"]
    table(head, cost)


def defences(audit: LeakAudit) -> None:
    """What a change hides and what it costs, at every layer."""
    layers = audit.layers
    head = ["", *(f"read, {layer}" for layer in layers), *(f"next token, {layer}" for layer in layers)]
    rows = []
    for name in audit.exposures:
        if name in ORDERS:  # which have a table of their own, with more states
            continue
        cells = [audit.at(name, layer) for layer in layers]
        rows.append([name, *map(shown, cells), *(price(cell.utility if cell else None) for cell in cells)])
    table([*head, *(f"perplexity, {layer}" for layer in layers)],
          [[*row, *(perplexity(audit.at(row[0], layer)) for layer in layers)] for row in rows])  # fmt: skip
    before = {cell.utility.perplexity_before for cell in audit.cells if cell.utility}
    print("Perplexity before:", ", ".join(f"{one:.4g}" for one in sorted(before)), "\n")  # noqa: T201
    points = []
    for family, layer, curve in curves(audit):
        ordered = curve if family != "cut" else curve[::-1]
        at = break_even(ordered)
        cost = "" if at is None or at.utility is None else f"{100 * at.utility.top1_changed:.0f} %"
        points.append([family, str(layer), "none" if at is None else at.exposure, cost,
                       shown(at or ordered[-1])])  # fmt: skip
    table(
        ["defence", "layer", "half unread from", "next tokens that change", "read there, or at most"], points
    )


def orders(audit: LeakAudit) -> None:
    """What a secret order or rotation hides: nothing is changed, so that the model loses nothing."""
    rows = []
    for name in audit.exposures:
        cells = [cell for layer in audit.layers if (cell := audit.at(name, layer)) is not None]
        seconds = f"{min(c.seconds for c in cells):.0f} to {max(c.seconds for c in cells):.0f}"
        rows.append([name, *(shown(cell) or "not found out" for cell in cells), seconds])
    table(["secret", *map(str, audit.layers), "seconds for all prompts"], rows)


def price(utility: Utility | None) -> str:
    """The share of next tokens that change."""
    return "" if utility is None else f"{100 * utility.top1_changed:.1f} %"


def perplexity(cell: LeakCell | None) -> str:
    """Of a model that goes on with changed states."""
    return "" if cell is None or cell.utility is None else f"{cell.utility.perplexity:.4g}"


def figure(audit: LeakAudit, away: dict[str, Any]) -> None:
    """Tokens read under white noise, next tokens that change, and where the median D/2 lies."""
    drawn = go.Figure()
    for layer, colour in zip(audit.layers, COLOURS, strict=False):
        curve = audit.curve("noise", layer)
        strength = [float(cell.exposure.partition(":")[2]) for cell in curve]
        line = {"color": colour}
        hasty = [any(one.hurried for one in cell.sample) for cell in curve]
        drawn.add_scatter(
            x=strength, y=[cell.tokens for cell in curve], name=f"layer {layer}: read", line=line,
            marker={"symbol": ["circle-open" if one else "circle" for one in hasty], "size": 10},
        )  # fmt: skip
        changed = [cell.utility.top1_changed if cell.utility else None for cell in curve]
        drawn.add_scatter(
            x=strength, y=changed, name=f"layer {layer}: next token changed", line=line | {"dash": "dot"}
        )
        middle = statistics.median(one for at, some in away[str(layer)].items() if at != "0" for one in some)
        drawn.add_scatter(
            x=[50 * middle] * 2, y=[0, 1], mode="lines", line=line | {"dash": "dash", "width": 1},
            name=f"layer {layer}: median D/2",
        )  # fmt: skip
    drawn.update_layout(
        title="White noise: what is still read (hollow: in haste), and what it costs (SmolLM2-135M)",
        xaxis={"title": "length of the noise, % of the state's", "type": "log", "tickvals": strength},
        yaxis={"title": "share of tokens", "range": [0, 1.02]},
        width=900, height=480, margin={"r": 240},
    )  # fmt: skip
    save_figures({"defences": drawn}, HERE / "figures", ("svg",))


def files(document: dict[str, Any]) -> None:
    """What was read of each kind of file."""
    rows = [
        [one["kind"], str(one["prompts"]), str(one["right"]), str(one["tokens"]),
         ", ".join(f"{count} {status}" for status, count in one["statuses"].items()),
         " ".join({re.sub(r"[0-9.]+", "", proof): proof for proof in one["proofs"]}.values())]
        for one in document["kinds"]
    ]  # fmt: skip
    table(["kind", "prompts", "right", "tokens", "status", "proof"], rows)


def main() -> None:
    """All of it."""
    standard(LeakAudit.from_dict(read("leak-cpu.json")["audit"]))
    strengths = LeakAudit.from_dict(read("leak-defences-cpu.json")["audit"])
    defences(strengths)
    orders(LeakAudit.from_dict(read("leak-orders-cpu.json")["audit"]))
    figure(strengths, read("noise-margins.json")["margins"])
    files(read("leak-files.json"))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        keep(Path(sys.argv[1]), sys.argv[2])
    main()
