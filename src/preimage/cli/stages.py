"""The progress bar: which stage, how much of it, how long it took, how long the rest should take."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

_FIRST = "getting ready"
_BAR = 30  # characters of the bar itself, at most


class Stages:
    """Reports of the one progress protocol, shown as stages of a bar; every stage has its own clock.

    ``harmless`` is what a name goes through before a terminal sees it.
    """

    def __init__(self, bar: Bar, harmless: Callable[[str], str]) -> None:
        self._bar, self._harmless = bar, harmless
        self._task = bar.add_task(_FIRST, total=None)
        self._at = (0, 0)

    def report(self, done: int, total: int, note: str) -> None:
        """Show what was reported: a new stage where the count begins anew."""
        before, of = self._at
        if total != of or done < before:
            self._bar.reset(self._task, total=total if total > 1 else None)
        self._at = (done, total)
        self._bar.update(self._task, completed=done, description=self._harmless(note) or _FIRST)


class Pieces(ProgressColumn):
    """How many pieces are done; nothing of a stage that is one."""

    def render(self, task: Task) -> Text:
        """3/10."""
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class Clock(ProgressColumn):
    """How long a stage has taken, and how long the rest of it should take."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """0:12, 1:30 left."""
        passed = _minutes(task.finished_time if task.finished else task.elapsed)
        left = None if task.total is None or task.finished else task.time_remaining
        return Text(passed if left is None else f"{passed}, {_minutes(left)} left")


def stage_bar(console: Console) -> Bar:
    """The bar, which goes when the work is done; a long name of a stage is cut, never a number."""
    whole = {"no_wrap": True, "overflow": "ignore"}
    return Bar(
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        BarColumn(bar_width=min(_BAR, console.width // 6)),
        Pieces(Column(min_width=7, **whole)),  # type: ignore[arg-type]  # Column's own words
        Clock(Column(min_width=18, **whole)),  # type: ignore[arg-type]
        console=console,
        transient=True,
        expand=True,
    )


def _minutes(seconds: float | None) -> str:
    whole = int(seconds or 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
