"""Independent items, run one after another in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from preimage.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_each(
    work: Callable[[Item], Result], items: Sequence[Item], progress: Progress, note: str
) -> list[Result]:
    """Results in the order of the items; progress is told after each."""
    results: list[Result] = []
    progress(0, len(items), note)
    for item in items:
        results.append(work(item))
        progress(len(results), len(items), note)
    return results
