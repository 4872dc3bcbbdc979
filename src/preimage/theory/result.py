"""Verdicts on what the theory states, each with the bound it rests on and what it does not show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from preimage.storage import Saved, plain


@dataclass(frozen=True)
class Verdict:
    """One statement: whether it holds, by which number, and where that number's evidence ends.

    ``holds`` is None where nothing could be decided; ``value`` is what was measured and ``bound`` what it was
    compared with, None for statements without a number. ``descriptive``: the theory allows either answer,
    and which it is says something of the model and the prompts. ``id`` names the statement for programs and
    stays when its words change.
    """

    id: str
    statement: str
    holds: bool | None
    value: float | None
    bound: float | None
    not_shown: str
    descriptive: bool = False


@dataclass(frozen=True)
class TheoryReport(Saved):
    """What one check found: ``subject`` says on what, ``tables`` hold the numbers behind the verdicts."""

    _kind = "theory"

    check: str
    subject: dict[str, Any]
    verdicts: tuple[Verdict, ...]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every statement does."""
        return all(verdict.holds is True for verdict in self.verdicts)

    @property
    def refuted(self) -> tuple[Verdict, ...]:
        """Statements that ought to hold and do not; what is undecided is not among them."""
        return tuple(v for v in self.verdicts if v.holds is False and not v.descriptive)

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        document: dict[str, Any] = plain({**asdict(self), "holds": self.holds})
        return document
