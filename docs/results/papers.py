"""Both papers beside us: papers.md from the raw json beside it.

    for name in …; do preimage reproduce $name --out docs/results/raw/papers; done
    python docs/results/build.py

The page has one section for every item that was measured, and names those that were not.
"""

import json
from pathlib import Path

from preimage.reproduce import ITEMS, Reproduction

HERE = Path(__file__).parent
HEAD = """# The papers beside us

Every table and figure of arXiv 2510.15511 and arXiv 2511.14808 that names numbers, by the command that measures it again. Written by `python docs/results/build.py` from `raw/papers/`; how to read it, and what an item does, stands in [docs/reproduce.md](../reproduce.md).

"""  # noqa: E501  # markdown has a paragraph a line


def page(found: dict[str, Reproduction]) -> str:
    """The whole page."""
    lines = ["| item | paper | command | what came out |", "|---|---|---|---|"]
    for name, item in ITEMS.items():
        one = found.get(name)
        said = "not measured here" if one is None else summary(one)
        link = name if one is None else f"[{name}](#{name})"
        command = f"`preimage reproduce {name}`" if one is None else f"`{' '.join(asked(one))}`"
        lines.append(f"| {link}: {item.title} | {item.paper} | {command} | {said} |")
    sections = [section(name, found[name]) for name in ITEMS if name in found]
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(sections)


def asked(one: Reproduction) -> list[str]:
    """The command, without where its files went."""
    words = list(one.record["command"])
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return words


def summary(one: Reproduction) -> str:
    """The verdicts of an item, each with how many of its lines have it."""
    verdicts = [row.verdict for row in one.rows if row.verdict]
    return "; ".join(
        f"{verdict} ({verdicts.count(verdict)} of {len(verdicts)})" for verdict in dict.fromkeys(verdicts)
    )


def section(name: str, one: Reproduction) -> str:
    """One item."""
    record = one.record
    where = record["gpu"] or f"{record['processor']}, {record['threads']} threads"
    made = (
        f"`{' '.join(asked(one))}`, {one.seconds:,.0f} s on {where}, torch {record['versions']['torch']}, "
        f"{record['date'][:10]}, commit {str(record['commit'])[:12]}."
    )
    return f"## {name}\n\n{made}\n\n{one.markdown()}"


def text() -> str:
    """The page of what lies in raw/papers."""
    paths = sorted((HERE / "raw" / "papers").glob("*.json"))
    return page({path.stem: Reproduction.from_dict(json.loads(path.read_text())) for path in paths})
