"""Verdicts on what the theory states, each with the bound it rests on and what it does not show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from preimage.markup import Markup
from preimage.storage import Saved, dataframe, plain
from preimage.views import Shown, Tone, details, table


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


@dataclass(frozen=True, repr=False)
class TheoryReport(Saved, Shown):
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

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a statement, for tables."""
        return [asdict(verdict) for verdict in self.verdicts]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a statement."""
        return dataframe(self.rows())

    def _line(self) -> str:
        held = sum(verdict.holds is True for verdict in self.verdicts)
        return f"{self.check}: {held} of {len(self.verdicts)} statements hold, {len(self.refuted)} refuted"

    def _tone(self) -> Tone:
        return "bad" if self.refuted else "good" if self.holds else "plain"

    def _parts(self) -> Iterable[Markup]:
        yield table(self.rows(), columns=("statement", "holds", "value", "bound", "not_shown"))
        if self.subject:
            subject = [{"": name, "on what": str(value)} for name, value in self.subject.items()]
            yield details("On what", table(subject))
        for name, rows in self.tables.items():
            yield details(name, table(rows))
