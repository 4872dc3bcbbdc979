"""The result of an inversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import count, repeat
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from preimage.errors import clip
from preimage.layers import Layer
from preimage.markup import Markup
from preimage.storage import Saved, dataframe
from preimage.views import Piece, Shown, Tone, details, number, table, tokens, words

Status: TypeAlias = Literal["recovered", "ambiguous", "likely", "not_recovered"]
Unique: TypeAlias = Literal["proved", "tested"]


Apart: TypeAlias = tuple[float | None, float, int]


class Reading(NamedTuple):
    """The likeliest tokens, from whatever is known, and how sure each is; also where nothing was verified."""

    token_ids: tuple[int, ...]
    text: str | None
    confidence: tuple[float, ...]  # the probability that a token is right; 1 where it was verified
    tokens: tuple[str, ...] = ()  # the text of each by itself; none without a tokenizer


class Position(NamedTuple):
    """What verification saw at one position. Distances are |F(v; prefix, t) - h_t|_2."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    token_id: int  # the accepted token, or the nearest one where none was accepted
    distance: float
    radius: float  # the largest accepted distance
    accepted: bool
    runner_up_id: int | None  # nearest other token among those tested
    runner_up_distance: float | None
    tests: int
    margin: float | None = None  # D: the state of the nearest other token of the whole vocabulary, if proved
    tolerated_noise: float | None = None  # D / 2: a state moved by less is still nearest to its own token's


class VerifiedPositions(Sequence[Position]):
    """The verified positions of a prompt, each made when it is looked at: a batch has very many."""

    def __init__(
        self,
        token_ids: Sequence[int],
        distances: Sequence[float],
        radii: Sequence[float],
        tests: Sequence[int],
        rivals: Sequence[int] = (),  # none where none was tested
        rival_distances: Sequence[float] = (),
    ) -> None:
        self.token_ids = tuple(token_ids)
        self._columns = distances, radii, tests
        self._rivals = rivals, rival_distances

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Position, ...]: ...
    def __getitem__(self, index: int | slice) -> Position | tuple[Position, ...]:
        at = range(len(self))[index]
        if isinstance(at, range):
            return tuple(self[i] for i in at)
        distance, radius, tests = (column[at] for column in self._columns)
        rivals, distances = self._rivals
        rival, away = (rivals[at], distances[at]) if rivals else (None, None)
        return Position(at, self.token_ids[at], distance, radius, True, rival, away, int(tests))

    def __iter__(self) -> Iterator[Position]:
        rivals, away = self._rivals if self._rivals[0] else (repeat(None), repeat(None))
        distances, radii, tests = self._columns
        columns = distances, radii, repeat(True), rivals, away, map(int, tests)
        return map(Position, count(), self.token_ids, *columns)

    def apart(self) -> Iterator[Apart]:
        """How far off the nearest other token is, what is allowed and how many were tried, everywhere."""
        return zip(self._rivals[1] or repeat(None), *self._columns[1:], strict=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, repr=False)
class Inversion(Saved, Shown):
    """One prompt recovered from its states, or the proof that it was not. Distances are in units of a state.

    ``recovered``: every position verified, one pass over the whole recovered prompt reproduces the states
    within the noise, and nothing else fits. ``unique`` says how that is known: "proved" where the whole
    vocabulary was tried at every position, "tested" where some tokens were, at positions where they all lie
    far apart; ``uniqueness`` says it in words. ``ambiguous``: several prompts fit, or others may; those known
    to are in ``alternatives``, ``fitting`` is how many they are, and ``complete`` whether there are no others
    and all are listed (64 at most are). ``likely``: no prompt reproduces the states exactly, but one does as
    far as noise, another precision or another engine explains; ``reason`` says what it looks like.
    ``not_recovered``: ``reason`` says at which position nothing fits and how far off the best candidate was,
    or what the states look like instead; ``token_ids`` is the verified part. ``reading`` is there always: the
    likeliest token everywhere, with its probability.

    ``margin`` is the smallest distance, over positions, from the observed state to the nearest tested token
    that is not the accepted one: an upper bound of the true margin. Once proved it is the smallest D.
    ``setup_seconds`` went by before the first prompt: measuring noise, loading or building what proposes.

    >>> from preimage import Inversion, capture, invert, models
    >>> model = models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> (result,) = invert(model, capture(model, [[7, 3, 9]], layers=1), proposers="prior")
    >>> result.positions[0].token_id, result.positions[0].accepted
    (7, True)
    >>> Inversion.from_dict(result.to_dict()) == result
    True
    """

    _kind = "inversion"

    status: Status
    token_ids: tuple[int, ...]
    text: str | None
    layer: Layer
    method: str
    proposer: str  # what ranked the tokens, e.g. lens-15 or codebook+prior; empty where nothing did
    seconds: float
    setup_seconds: float  # of the call, for all its prompts together
    forward_tokens: int  # token positions run through the model, in all
    tests: int  # verifier tests; never more than positions x vocabulary, where every position was kept
    margin: float | None
    noise_floor: float  # relative
    seed: int
    positions: Sequence[Position]
    reading: Reading
    observe: str  # where in the model the states were seen
    order: tuple[int, ...]  # of rows that came in an unknown one: the row of every position
    fitting: int
    complete: bool
    unique: Unique | None
    uniqueness: str
    alternatives: tuple[tuple[int, ...], ...]
    failed_position: int | None
    failed_distance: float | None
    reason: str

    def claims(self, ids: Sequence[int]) -> bool:
        """Whether these ids are the recovered prompt, or among those listed as fitting."""
        if self.status in ("recovered", "likely"):
            return self.token_ids == tuple(ids)
        return self.status == "ambiguous" and tuple(ids) in self.alternatives

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {
            "positions": [position._asdict() for position in self.positions],
            "reading": self.reading._asdict(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a position, for tables: of the reading, beside what verification saw there."""
        seen = {position.index: position for position in self.positions}
        read = self.reading
        spelled = read.tokens or repeat(None)
        rows: list[dict[str, Any]] = []
        for index, (token, text, sure) in enumerate(
            zip(read.token_ids, spelled, read.confidence, strict=False)
        ):
            at: tuple[Any, ...] = seen.get(index, (None,) * len(Position._fields))
            found = dict(zip(Position._fields[2:], at[2:], strict=True))
            rows.append({"index": index, "token_id": token, "token": text, "confidence": sure, **found})
        return rows

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a position."""
        return dataframe(self.rows())

    def _line(self) -> str:
        shown = self.reading.text
        if shown is None:
            shown = " ".join(map(str, self.reading.token_ids))
        margin = "" if self.margin is None else f", margin {number(self.margin)}"
        return (
            f"{self.status} at layer {self.layer} by {self.method}: {clip(repr(shown), 80)}, "
            f"{len(self.reading.token_ids)} tokens{margin}, {self.seconds:.2f} s"
        )

    def _tone(self) -> Tone:
        tones: dict[Status, Tone] = {"recovered": "good", "ambiguous": "warn", "likely": "warn"}
        return tones.get(self.status, "bad")

    def _parts(self) -> Iterable[Markup | None]:
        rows = self.rows()
        yield tokens(
            [
                Piece(
                    f" {row['token_id']}" if row["token"] is None else row["token"],
                    row["confidence"],
                    _told(row),
                )
                for row in rows
            ]
        )
        if self.reason or self.uniqueness:
            yield words(self.reason or f"Nothing else fits ({self.unique}): {self.uniqueness}")
        if rows:
            yield details("Positions", table(rows, columns=_SHOWN))


_SHOWN = ("index", "token_id", "token", "confidence", "distance", "radius", "accepted",
          "runner_up_id", "runner_up_distance")  # fmt: skip


def _told(row: dict[str, Any]) -> str:
    """What is told of a token that is pointed at."""
    if row["distance"] is None:
        return "not verified"
    told = f"{number(row['distance'])} off, {number(row['radius'])} allowed"
    if row["margin"] is not None:
        return f"{told}, margin {number(row['margin'])} (proved)"
    away = row["runner_up_distance"]
    return told if away is None else f"{told}, nearest other token tried {number(away)}"
