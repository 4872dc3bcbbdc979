"""The one progress protocol. The library reports; whoever called it decides whether to draw a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# Called as work advances: units done, units in all, and a word on what they are.
Progress: TypeAlias = Callable[[int, int, str], None]


def silent(done: int, total: int, note: str) -> None:
    """The default: report to nobody."""
