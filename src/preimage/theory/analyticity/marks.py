"""What is known of a tensor on the way from the parameters to a state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import CodeType

from torch import Tensor

from preimage.theory.analyticity.ranges import Range
from preimage.theory.analyticity.rules import Break


@dataclass(frozen=True)
class Event:
    """Something on the way from the parameters that is not analytic, or not known to be, and where."""

    path: str
    owner: str  # class of the module
    broken: Break


@dataclass(frozen=True)
class Shift:
    """Events that a softmax over a dimension takes away, because they shift all of its entries alike.

    ``form`` is the size and the layout of the tensor this was seen of: another view of it has other rows.
    """

    events: frozenset[Event]
    dim: int  # counted from the end
    form: object = None

    def of(self, tensor: Tensor) -> Shift:
        """The same, said of one tensor."""
        return replace(self, form=_form(tensor))

    def holds_for(self, tensor: Tensor) -> bool:
        """Whether a tensor is the one that was seen."""
        return self.form == _form(tensor)


@dataclass(frozen=True)
class Mark:
    """What is known of a tensor's entries.

    ``values``: which they may be over all parameters, None where they depend on none. ``stepped``: they
    depend on them by jumps alone, and are constant in between. ``shift``: what a softmax would take away
    of it. ``unwritten``: nothing has been seen to write them.
    """

    values: Range | None = None
    events: frozenset[Event] = frozenset()
    stepped: bool = False
    shift: Shift | None = None
    unwritten: bool = False


@dataclass
class Trace:
    """What was seen of a pass: the operations of every module, and what reached the states."""

    operations: dict[str, set[str]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # from a module's path to its class
    reached: set[Event] = field(default_factory=set)
    lines: dict[CodeType, set[int]] = field(default_factory=dict)  # that ran, of the code that called torch
    places: dict[CodeType, tuple[str, str]] = field(default_factory=dict)  # its module: path and class


def is_broken(events: Iterable[Event]) -> bool:
    """Whether one of them is known not to be analytic."""
    return any(event.broken.analytic is False for event in events)


def _form(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
