"""The growth figure of cluster.md, from the raw json beside it: python docs/results/cluster_growth.py."""

import json
from pathlib import Path

import plotly.graph_objects as go

from preimage.figures import save_figures

HERE = Path(__file__).parent
COLOURS = {"pieces captured": "#0072B2", "layers compared": "#D55E00"}


def main() -> None:
    """Seconds of capture and of pairs, and a worker's memory against its plan, by the number of prompts."""
    runs = json.loads((HERE / "raw/cluster-growth.json").read_text())["runs"]
    prompts = [run["prompts"] for run in runs]
    figure = go.Figure()
    for stage, colour in COLOURS.items():
        seconds = [run["cluster_stage_seconds"][stage] for run in runs]
        figure.add_scatter(x=prompts, y=seconds, name=f"{stage}, s", line={"color": colour})
    for key, name, dash in (
        ("measured", "a worker's peak, GiB", "solid"),
        ("planned", "planned, GiB", "dot"),
    ):
        sizes = [
            run["worker_peak_bytes"] if key == "measured" else run["plan"]["worker_bytes"] for run in runs
        ]
        figure.add_scatter(
            x=prompts, y=[size / 2**30 for size in sizes], name=name, line={"color": "#009E73", "dash": dash}
        )
    figure.update_xaxes(type="log", title="prompts of 32 tokens", tickvals=prompts)
    figure.update_yaxes(type="log", title="seconds, GiB", dtick=1)
    figure.update_layout(template="plotly_white", title="Two workers, four layers of smollm2, two cores")
    save_figures({"growth": figure}, HERE / "figures", ("svg",))


if __name__ == "__main__":
    main()
