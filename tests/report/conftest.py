"""A browser for this folder, and pages with one of everything in them."""

from collections.abc import Iterator

import plotly.graph_objects as go
import pytest

from preimage.report import (
    Bullets,
    Cell,
    Column,
    Details,
    Facts,
    Figure,
    Heading,
    Notice,
    Page,
    Paragraph,
    Preformatted,
    Section,
    Table,
    Token,
    Tokens,
)
from support.browser import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="session")
def sample() -> Page:
    """A report such as people get, every kind of part in it."""
    layers = [1, 8, 15, 22, 30, "final"]
    curves = go.Figure()
    for name, shares in (("isotropic noise", (1, 1, 0.9, 0.5, 0.1, 0)), ("int4", (1, 1, 1, 1, 0.8, 0.7))):
        curves.add_scatter(x=[5, 10, 20, 50, 100, 200], y=shares, name=name, mode="lines+markers")
    curves.update_layout(title="Tokens read against noise · smollm2, float32, 0123abc")
    curves.update_xaxes(title="noise, share of a state's length (%)", type="log")
    curves.update_yaxes(title="share of tokens read")
    map_ = go.Figure(go.Heatmap(z=[[1, 2, 3], [4, 5, 6]], x=["a", "b", "c"], y=["layer 1", "layer 15"]))
    tones = ("bad", "warn", "good", "plain")
    kinds = [f"kind {number}" for number in range(11)]
    table = Table(
        columns=["observation", *(Column(kind, numeric=True) for kind in kinds)],
        rows=[
            [
                f"layer {layer}",
                *(Cell(f"{9 * column}.5 %", tones[column % 4], "2.1 s") for column in range(11)),
            ]
            for layer in layers
        ],
        caption="Share of tokens read, by layer and by what was stored.",
    )
    text = Tokens(
        [
            Token("The", 1.0),
            Token(" cat", 0.97),
            Token(" sat", 0.7, "truth: ' lay'"),
            Token("\n", 0.3),
            Token("?"),
        ],
        "Prompt 1, read from layer 15",
    )
    return Page(
        "What leaks from smollm2",
        "100 prompts, layers 1 to final, float32",
        [
            Section("Verdict", [Notice("Every prompt can be read.", "By anyone with the model.", "bad")]),
            Section(
                "By layer", [Paragraph("What was tried."), table, Figure(curves, "Both fall.", "Curves.")]
            ),
            Section("Texts", [text, Heading("A map"), Figure(map_, "Six cells.")]),
            Section(
                "Advice", [Bullets(["Encrypt at rest.", "Salt the hashes."]), Preformatted("preimage leak x")]
            ),
            Section("Hidden", [Details("What was not tried", [Paragraph("Folded words.")])]),
            Section("Provenance", [Facts([("model", "smollm2"), ("torch", "2.13.0")])]),
        ],
    )
