"""What a page is made of. All texts are plain: whatever they hold is shown, never interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import plotly.graph_objects as go

Tone: TypeAlias = Literal["plain", "good", "warn", "bad"]


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text; line breaks in it are kept."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of short texts."""

    items: Sequence[str]


@dataclass(frozen=True)
class Notice:
    """A box for a verdict: one sentence in bold, and more about it. The tone adds colour and a mark."""

    title: str
    text: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Column:
    """The head of a column; the figures of a numeric one stand under one another."""

    name: str
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell with a tone, which is a tint and a mark before the text, and a note in small letters below."""

    text: str
    tone: Tone = "plain"
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table; where it is wider than the screen it scrolls within its own box.

    ``row_headers``: whether the first cell of a row says what the row is about.
    """

    columns: Sequence[str | Column]
    rows: Sequence[Sequence[str | Cell]]
    caption: str
    row_headers: bool = True

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"Row {number} has {len(row)} cells for {len(self.columns)} columns.")


@dataclass(frozen=True)
class Figure:
    """A plotly figure, a sentence that says the same to who does not see it, and a caption.

    The page gives it background, fonts and width, and where its traces name none of their own, colours,
    dashes and symbols that can be told apart on light and dark (``PALETTE``). Its title, which may be long,
    is set above it as text of the page. Strings in it are text as everywhere; a newline breaks a line, and of
    more than 160 letters the middle is left out (also of categories: number those that may be longer). In a
    ``hovertemplate`` plotly's ``%{…}``, ``<br>`` and ``<extra>`` work, so texts of others do not belong into
    one, but into ``text`` or ``customdata``.
    """

    figure: go.Figure
    alternative: str
    caption: str = ""


@dataclass(frozen=True)
class Token:
    """A token as text, how sure it is (0 to 1, None where nothing is known), and a note shown with that."""

    text: str
    confidence: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tokens:
    """A text as its tokens: the less sure one is, the more its underline and tint stand out.

    The number is shown when a token is pointed at, doubtful ones can be reached by the keyboard too, and in
    print theirs stand behind them.
    """

    tokens: Sequence[Token]
    label: str


@dataclass(frozen=True)
class Difference:
    """Two texts in pieces, one above the other; those that only one of them has at its place are marked."""

    first: Sequence[str]
    second: Sequence[str]
    label: str


@dataclass(frozen=True)
class Preformatted:
    """Text as it is, in letters of one width: a command, a file's content."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and what they stand for: versions, hardware, date, command."""

    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Details:
    """Parts that are shown when asked for; in print they are."""

    summary: str
    parts: Sequence[Part]


Part: TypeAlias = (
    Paragraph
    | Heading
    | Bullets
    | Notice
    | Table
    | Figure
    | Tokens
    | Difference
    | Preformatted
    | Facts
    | Details
)
