"""Prompts of several kinds of text that no lens was trained on, from four packages of Debian.

    apt-get download fortunes fortunes-de libjs-jquery manpages
    for one in *.deb; do dpkg -x $one text; done
    python docs/results/texts.py text PROMPTS.json

English prose (sayings), code (JavaScript), German prose, manual pages (English in troff's markup), and random
tokens: lists of 64 token ids of the default model each, without BOS, no two windows of one place.
"""

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import fortunes

import preimage

LENGTH = 64
MOST = {"prose": 400, "code": 400, "german": 100, "manual": 100, "random": 400}


def main(folder: Path, out: Path) -> None:
    """Draw them."""
    model = preimage.load("smollm2", device="cpu")
    tokenizer = model.tokenizer
    share = folder / "usr" / "share"
    script = (share / "javascript" / "jquery" / "jquery.js").read_text()
    pages = sorted((share / "man").rglob("*.gz"))
    texts = {
        "prose": fortunes.sayings(share / "games" / "fortunes", fortunes.TOPICS),
        "german": fortunes.sayings(
            share / "games" / "fortunes" / "de", ("anekdoten", "gedichte", "witze", "zitate")
        ),
        "code": [script],
        "manual": [gzip.decompress(page.read_bytes()).decode(errors="replace") for page in pages],
    }
    draw = random.Random(7)
    prompts = {kind: drawn(some, tokenizer, draw, MOST[kind]) for kind, some in texts.items()}
    options = preimage.PromptOptions(count=MOST["random"], length=LENGTH, seed=7)
    prompts["random"] = [list(row) for row in preimage.gather("random", model, options)]
    out.write_text(json.dumps(prompts))
    print({kind: len(rows) for kind, rows in prompts.items()})  # noqa: T201


def drawn(texts: list[str], tokenizer: object, draw: random.Random, most: int) -> list[list[int]]:
    """Some windows of some texts, in no order."""
    rows = [row for text in texts for row in windows(tokenizer(text, add_special_tokens=False)["input_ids"])]  # type: ignore[operator]
    draw.shuffle(rows)
    return rows[:most]


def windows(ids: list[int]) -> Iterator[list[int]]:
    """Windows of a text, one behind the other, as long as it has tokens."""
    for start in range(0, len(ids) - LENGTH + 1, LENGTH):
        yield ids[start : start + LENGTH]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
