"""Draws docs/picture.svg, the picture of the README, from a real run: python docs/picture.py

A prompt is run through smollm2, its states are kept at a few layers, and every layer's are inverted without
the prompt. A cell shows the token that came back; its shade, how far the nearest other token that was tried
lies from the observed state, in multiples of what is allowed. A wrong token would be red.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

import preimage
from preimage.inversion.result import Position
from preimage.storage import write_text

PROMPT = "The door code is 4711, don't tell Anna."
LAYERS = (1, 8, 15, 22, 30, "final")
HIGH, TOP, LEFT, GAP = 30, 80, 64, 4  # pixels
PER_CHARACTER, LEAST = 8.6, 30
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1c2430 }
.note, .layer { font: 12px system-ui, sans-serif; fill: #57606a }
.title { font: 600 14px system-ui, sans-serif }
.cell { fill: #1f7a5c }
.wrong { fill: #c62828 }
@media (prefers-color-scheme: dark) {
  text, .title { fill: #e6edf3 } .note, .layer { fill: #9aa4af } .cell { fill: #3fb68b }
}
"""


def apart(position: Position) -> float:
    """How far off the nearest other token that was tried is, in multiples of the allowed distance."""
    return (position.runner_up_distance or position.radius) / position.radius


def main() -> None:
    """Run, invert, draw."""
    model = preimage.load("smollm2")
    states = preimage.capture(model, [PROMPT], layers=list(LAYERS))
    assert states.token_ids is not None
    truth = states.token_ids[0]
    # What the inverter is given has no token ids: the states of a layer alone.
    alone = [preimage.States.from_tensor([states.at(0, layer)], layer) for layer in LAYERS]
    found = [preimage.invert(model, one, layer)[0] for one, layer in zip(alone, LAYERS, strict=True)]
    words = [model.decode([token]) or str(token) for token in truth]
    widths = [max(LEAST, math.ceil(PER_CHARACTER * len(word)) + 10) for word in words]
    left = [LEFT + sum(widths[:at]) + GAP * at for at in range(len(words))]
    width = left[-1] + widths[-1] + 8
    right = sum(one.status == "recovered" and one.token_ids == truth for one in found)
    every = [apart(position) for one in found for position in one.positions]
    drawn = [
        f'<text class="title" x="8" y="22">Recovered, token for token, at {right} of {len(LAYERS)} layers of '
        f"{model.name}</text>",
        '<text class="note" x="8" y="44">A row: what came back from the states of that layer alone.</text>',
        '<text class="note" x="8" y="62">The stronger the colour, the further off every other token that was '
        f"tried: {min(every):,.0f} to {max(every):,.0f} times what is allowed.</text>",
    ]
    for row, (layer, one) in enumerate(zip(LAYERS, found, strict=True)):
        top = TOP + row * (HIGH + GAP)
        drawn.append(f'<text class="layer" x="8" y="{top + 20}">{"layer " if row == 0 else ""}{layer}</text>')
        for at, token in enumerate(one.token_ids):
            times = apart(one.positions[at])
            shade = min(0.8, max(0.1, 0.1 + 0.25 * (math.log10(times) - 2)))
            kind = "cell" if token == truth[at] else "wrong"
            shown = escape(model.decode([token]) or str(token)).replace(" ", "␣")
            drawn.append(
                f'<rect class="{kind}" fill-opacity="{shade:.2f}" x="{left[at]}" y="{top}" rx="4" '
                f'width="{widths[at]}" height="{HIGH}"><title>layer {layer}, {shown}: the nearest other '
                f"token tried is {times:,.0f} times as far off as is allowed</title></rect>"
                f'<text x="{left[at] + widths[at] / 2:.0f}" y="{top + 20}" '
                f'text-anchor="middle">{shown}</text>'
            )
    height = TOP + len(LAYERS) * (HIGH + GAP) + 4
    said = f"The tokens of a prompt, recovered at {right} of {len(LAYERS)} layers of {model.name}"
    write_text(
        Path(__file__).with_name("picture.svg"),
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{said}">\n<style>{STYLE}</style>\n'
        + "\n".join(drawn)
        + "\n</svg>\n",
    )


if __name__ == "__main__":
    main()
