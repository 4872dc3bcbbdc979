"""The one progress protocol. The library reports; whoever called it decides whether to draw a bar."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

from preimage.errors import OptionError, clip, shown

# Called as work advances: units done, units in all, and a word on what they are.
Progress: TypeAlias = Callable[[int, int, str], None]
# What a caller may give: whoever is told, True for a bar, False or None for nothing.
Listener: TypeAlias = Progress | bool | None


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


@contextmanager
def reporting(listener: Listener) -> Iterator[Progress]:
    """Whom to tell while this lasts. True: a bar of tqdm, in a notebook or on stderr, named by the stage."""
    if listener is None or listener is False:
        yield silent
    elif listener is True:
        bar = _Bar()
        try:
            yield bar
        finally:
            bar.close()
    elif callable(listener):
        yield listener
    else:
        raise OptionError(
            f"progress is {clip(repr(listener), 80)}.",
            "Give True for a bar, False for none, or a function of units done, units in all and their name.",
        )


class _Bar:
    """One bar that begins anew with every stage."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage = ""

    def __call__(self, done: int, total: int, note: str) -> None:
        if self._bar is None:
            self._bar = _tqdm()(total=total or None, leave=True)
        bar = self._bar
        if note != self._stage or (total or None) != bar.total:
            self._stage = note
            bar.reset()  # time begins anew too
            bar.total = total or None
            bar.set_description_str(shown(note), refresh=False)
        bar.n = done
        bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a notebook has no widgets: then the bar is text
        from tqdm.auto import tqdm
    return tqdm


class Watch(NamedTuple):
    """What somebody is told who looks on while a model works, in the thread that works.

    ``passing`` is called before every pass of a model, and ``between`` before every block of one. What they
    raise ends the work there; a BaseException is taken for a refusal nowhere. ``settled`` is told the token
    ids of a prompt as they stand and how many of them, from the left, are verified (of a reading: decided);
    ids behind those are proposals.
    """

    passing: Callable[[], None]
    between: Callable[[], None]
    settled: Callable[[Sequence[int], int], None]


_watching: ContextVar[Watch | None] = ContextVar("watching", default=None)


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """While this lasts, every pass and every settled token of this thread is told."""
    before = _watching.set(watch)
    try:
        yield
    finally:
        _watching.reset(before)


def passing() -> Callable[[], None] | None:
    """Say that a pass begins, where somebody looks on; what is to be called before every block of it."""
    if (watch := _watching.get()) is None:
        return None
    watch.passing()
    return watch.between


def settled(ids: Callable[[], Sequence[int]], count: int) -> None:
    """Say which tokens a prompt has by now, and how many are settled; ids are made for who looks on alone."""
    if (watch := _watching.get()) is not None:
        watch.settled(ids(), count)
