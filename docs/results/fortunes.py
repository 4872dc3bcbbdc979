"""Prompts of text that no lens was trained on: sayings of Debian's package ``fortunes``.

    apt-get download fortunes && dpkg -x fortunes_*.deb text
    python docs/results/fortunes.py text/usr/share/games/fortunes PROMPTS.json

60 prompts of the first 64 tokens each, without BOS, as lists of token ids of the default model.
"""

import json
import random
import sys
from pathlib import Path

import preimage

TOPICS = ("science", "wisdom", "people", "literature", "work", "politics", "education", "medicine",
          "pratchett", "kids", "computers", "law", "love", "drugs", "food")  # fmt: skip


def sayings(folder: Path, topics: tuple[str, ...]) -> list[str]:
    """Every saying of these topics, but for tables."""
    files = [folder / topic for topic in topics if (folder / topic).exists()]
    every = [one.strip() for file in files for one in file.read_text(errors="replace").split("\n%\n")]
    return [one for one in every if "\t\t" not in one]


def main(folder: Path, out: Path) -> None:
    """Draw them."""
    tokenizer = preimage.load("smollm2", device="cpu").tokenizer
    files = [folder / topic for topic in TOPICS if (folder / topic).exists()]
    every = [one.strip() for file in files for one in file.read_text(errors="replace").split("\n%\n")]
    random.seed(3)
    random.shuffle(every)
    rows: list[list[int]] = []
    for saying in every:
        ids = tokenizer(saying, add_special_tokens=False)["input_ids"]
        if len(ids) >= 64 and "\t\t" not in saying:  # no tables
            rows.append(ids[:64])
    out.write_text(json.dumps(rows[:60]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
