"""Work that need not be done in this process: how it is told, and who does it now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from preimage.storage.places import Place

Group: TypeAlias = tuple[str, ...]  # keys of pieces that are done together


@dataclass(frozen=True)
class Errand:
    """Pieces of work as somebody else is told of them, in json and bytes alone.

    ``job`` names one of preimage's classes (``preimage.room.module:Class``), which is made there from
    ``spec`` and ``attached`` (see :mod:`preimage.cluster.worker`). ``inputs`` gives what goes with a group
    of pieces, ``after`` is done here behind each; nothing by default.
    """

    job: str
    spec: dict[str, Any]
    attached: bytes = b""
    inputs: Callable[[Group], bytes] | None = None
    after: Callable[[str], None] | None = None  # once a piece is kept
    folder: Place | None = None  # in which its shelf is; by default the run's own
    here_too: bool = False  # whether this process may begin with it, until the first worker is there


@runtime_checkable
class Workers(Protocol):
    """Somebody who does errands; ``count`` of them."""

    count: int

    def each(
        self,
        errand: Errand,
        groups: Sequence[Group],
        folder: Place,
        here: Callable[[Group], list[Any]] | None = None,
    ) -> Iterator[tuple[Group, list[Any]]]:
        """Every group as it gets finished, with a document for each of its keys.

        ``folder``: the run's. ``here`` does a group in this process, for as long as nobody else is there.
        """


_workers: ContextVar[Workers | None] = ContextVar("workers", default=None)


def current_workers() -> Workers | None:
    """Who does work elsewhere now; None where everything is done in this process."""
    return _workers.get()


@contextmanager
def working_with(workers: Workers | None) -> Iterator[None]:
    """While this lasts, runs hand their pieces to these workers; with None, they keep them."""
    before = _workers.set(workers)
    try:
        yield
    finally:
        _workers.reset(before)
