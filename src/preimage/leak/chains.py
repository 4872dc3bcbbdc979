"""Pages whose token ids were read, in their order, by their names: which are right, and in which prompt.

A page's name is a digest of the name before it and of its own ids (:mod:`preimage.leak.block_hashes`). Ids
that give a page its name are right beyond doubt, without a number of the model; and the name they had to be
hashed behind says what stood before. So pages in any order, of many prompts, fall into place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from preimage.leak.block_hashes import SCHEMES, SHORTEST_NAME, Encoded, Scheme, scheme_of
from preimage.leak.holdings import BlockName

Standing: TypeAlias = Literal["proved", "behind", "open", "contradicted", "unread"]
Page: TypeAlias = tuple[BlockName, Sequence[int] | None]


@dataclass(frozen=True)
class Placed:
    """What the names say of one page.

    ``standing``: ``proved``, its ids and all before them, from the prompt's beginning; ``behind``, its ids,
    but not those of all pages before it; ``open``, its name fits behind nothing that is here, for its ids are
    wrong, or a salt, a random start or a page that is missing stands before it; ``contradicted``, its name is
    that of other ids; ``unread``, no ids were given. ``token_ids``: those its name proves, its own or, where
    its own were wrong or missing, those that were read of another page of this name. ``before``: the page it
    follows, as an index; None: it begins a prompt, or that is not known. ``scheme``: how its name was made.
    """

    standing: Standing
    token_ids: tuple[int, ...] | None = None
    before: int | None = None
    scheme: str | None = None


@dataclass(frozen=True)
class ProvedPrompt:
    """Ids in a row that names prove: of ``pages``, indices in their order.

    ``behind``: the page that stands before them, whose own ids no name proves; None: they begin the prompt.
    """

    pages: tuple[int, ...]
    token_ids: tuple[int, ...]
    behind: int | None
    scheme: str


@dataclass(frozen=True)
class Arranged:
    """What :func:`arrange` found of each page, hashes it took, and whether all were tried.

    ``ends``: the proved pages that none follows, one of each name.
    """

    pages: tuple[Placed, ...]
    ends: tuple[int, ...]
    hashes: int
    finished: bool

    def prompts(self) -> Iterator[ProvedPrompt]:
        """One for every end; those that share a beginning share its pages.

        Made one at a time: many long prompts with one beginning are much larger than their pages.
        """
        for end in self.ends:
            way: list[int] = []
            at: int | None = end
            while at is not None and self.pages[at].token_ids is not None:
                way.append(at)
                at = self.pages[at].before
            way.reverse()
            ids = tuple(one for page in way for one in self.pages[page].token_ids or ())
            yield ProvedPrompt(tuple(way), ids, at, self.pages[end].scheme or "")


def arrange(pages: Sequence[Page], *, budget: int = 200_000_000) -> Arranged:
    """Where pages stand, from their names and the ids that were read of them, in any order and mixed.

    Each page is its name and its ids, None where they were not read. Of a page with several readings each
    may be given, with the same name. Ids of more than one page of the name (``BlockName.page``) are taken as
    several in a row, the last of which has the name.

    Ids are tried behind the known starts of the engine's schemes, then behind every name that was proved,
    then behind all others: a page that none precedes may stand behind a salt, and what follows it is proved
    by its name alone. Cost: each name once against each page not yet placed, so pages squared over two where
    most are proved, a hash of a page of 16 tokens taking 1 to 2 microseconds (10,000 pages: about a minute
    and a half); up to three times pages squared where none is. ``budget``: hashes in all.
    """
    by_name: dict[tuple[str, bytes], _Name] = {}
    own = [_name_of(by_name, index, name, ids) for index, (name, ids) in enumerate(pages)]
    hashes, finished = 0, True
    for engine in dict.fromkeys(engine for engine, _ in by_name):
        names = [name for (other, _), name in by_name.items() if other == engine]
        walk = _Walk([scheme for scheme in SCHEMES.values() if scheme.engine == engine], names)
        finished = walk.run(budget - hashes) and finished
        hashes += walk.hashes
    placed = [
        _placed(name, None if ids is None else tuple(ids)) for name, (_, ids) in zip(own, pages, strict=True)
    ]
    followed = {page.before for page in placed}
    ends = (name.index for name in by_name.values() if name.ids is not None and name.index not in followed)
    return Arranged(tuple(placed), tuple(sorted(ends)), hashes, finished)


class _Name:
    """A name, all that was read of pages that have it, and its place once that is known."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.indices: list[tuple[int, tuple[int, ...] | None]] = []
        self.readings: dict[tuple[tuple[int, ...], int], None] = {}  # ids, and tokens a page of them
        self.ids: tuple[int, ...] | None = None  # once they are proved
        self.scheme: Scheme | None = None
        self.before: _Name | None = None
        self.from_start = False

    @cached_property
    def index(self) -> int:
        """The page that stands for all of this name, asked for at the end: one that was read, and rightly."""
        right = (index for index, ids in self.indices if (ids == self.ids if self.ids else ids))
        return next(right, self.indices[0][0])


def _name_of(
    by_name: dict[tuple[str, bytes], _Name], index: int, name: BlockName, ids: Sequence[int] | None
) -> _Name:
    known = by_name.setdefault((scheme_of(name.scheme).engine, name.digest), _Name(name.digest))
    read = None if ids is None else tuple(ids)
    known.indices.append((index, read))
    if read:
        known.readings[read, name.page or len(read)] = None
    return known


def _placed(name: _Name, ids: tuple[int, ...] | None) -> Placed:
    """What is known of a page of this name of which these ids were read."""
    if name.ids is None or name.scheme is None:
        return Placed("open" if ids else "unread")
    before = None if name.before is None else name.before.index
    shown: Standing = "proved" if name.from_start else "behind"
    return Placed("contradicted" if ids and ids != name.ids else shown, name.ids, before, name.scheme.name)


@dataclass(frozen=True)
class _Reading:
    """What was read of a page, split and encoded as a scheme hashes it."""

    name: _Name
    ids: tuple[int, ...]
    parts: tuple[Encoded, ...]


class _Walk:
    """Pages of one engine, put behind what they follow, level by level."""

    def __init__(self, schemes: Sequence[Scheme], names: Sequence[_Name]) -> None:
        self._schemes, self._names = schemes, names
        self.hashes = 0
        self._waiting: deque[tuple[bytes, Scheme, _Name | None]] = deque()
        self._tried: set[tuple[bytes, str]] = set()
        # Of every scheme, what is not placed yet. A name is made by one, and leaves all of them at once.
        self._left = {
            scheme.name: {
                (name.digest, *reading): _Reading(name, reading[0], scheme.split(*reading))
                for name in names
                if SHORTEST_NAME <= len(name.digest) <= scheme.length
                for reading in name.readings
            }
            for scheme in schemes
        }

    def run(self, budget: int) -> bool:
        """Whether everything was tried that could have been, or nothing is left."""
        self._waiting.extend((root, scheme, None) for scheme in self._schemes for root in scheme.roots)
        if not self._drain(budget):
            return False
        for name in self._names:
            for scheme in self._schemes:
                if name.scheme is None and len(name.digest) == scheme.length:
                    self._waiting.append((name.digest, scheme, name))
            if not self._drain(budget):
                return False
        return True

    def _drain(self, budget: int) -> bool:
        while self._waiting:
            before, scheme, name = self._waiting.popleft()
            left = self._left[scheme.name]
            if not left or (before, scheme.name) in self._tried:
                continue
            self._tried.add((before, scheme.name))
            after = scheme.behind(before)
            for reading in tuple(left.values()):
                self.hashes += len(reading.parts)
                if self.hashes > budget:
                    return False
                digest = after(reading.parts[0])
                for part in reading.parts[1:]:
                    digest = scheme.behind(digest)(part)
                if digest.startswith(reading.name.digest) and reading.name.ids is None:
                    self._place(reading, digest, scheme, name)
        return True

    def _place(self, reading: _Reading, digest: bytes, scheme: Scheme, before: _Name | None) -> None:
        name = reading.name
        name.ids, name.scheme, name.before = reading.ids, scheme, before
        name.from_start = before is None or before.from_start
        for left in self._left.values():
            for other in name.readings:
                left.pop((name.digest, *other), None)
        self._waiting.append((digest, scheme, name))
