"""The one progress protocol. The library reports; whoever called it decides whether to draw a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

# Called as work advances: units done, units in all, and a word on what they are.
Progress: TypeAlias = Callable[[int, int, str], None]


def silent(done: int, total: int, note: str) -> None:
    """The default: report to nobody."""


_listening: ContextVar[Progress] = ContextVar("listening", default=silent)


@contextmanager
def told_of_stages(progress: Progress) -> Iterator[None]:
    """While this lasts, :func:`stage` reports here: what set-up is doing, however deep inside it."""
    before = _listening.set(progress)
    try:
        yield
    finally:
        _listening.reset(before)


def stage(note: str) -> None:
    """Say what begins now, where somebody listens: a part of set-up that may take seconds."""
    _listening.get()(0, 1, note)
