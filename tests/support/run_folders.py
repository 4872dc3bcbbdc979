"""What a run folder holds."""

from __future__ import annotations

from pathlib import Path


def lines_of(folder: Path) -> list[bytes]:
    items = folder / "items.jsonl"
    return items.read_bytes().splitlines(keepends=True) if items.exists() else []
