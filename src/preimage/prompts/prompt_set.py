"""The two records of this room: what was asked for, and the prompts that came of it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from preimage.errors import OptionError, clip
from preimage.markup import Markup
from preimage.storage import dataframe
from preimage.views import Shown, table


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts to take from a source.

    ``count``: at most so many, None for all (530 of a ``same-next`` set); the sources ``random`` and
    ``default`` give exactly so many or raise. ``length``: None takes whole prompts as they are
    (``random`` and ``default`` have no such thing and use 32, or the model's maximum if less); n cuts
    non-overlapping windows of exactly n tokens, BOS included, spread over the documents (a
    ``same-next`` prompt cannot be cut, and refuses it). ``seed`` decides which windows, which random
    ids and which ``same-next`` prompts. ``bos``: None is the tokenizer's own habit, True puts BOS
    first, False never adds it. ``keep_duplicates``: keep prompts with equal ids, otherwise removed
    after the first.
    """

    count: int | None = None
    length: int | None = None
    seed: int = 0
    bos: bool | None = None
    keep_duplicates: bool = False

    def __post_init__(self) -> None:
        for option in ("count", "length"):
            value = getattr(self, option)
            if value is not None and not _is_int(value, at_least=1):
                raise OptionError(f"{option} is {value!r}; allowed: a whole number from 1, or None.")
        # Random(-1) and Random(1) are one generator, so a negative seed would not be its own set
        check_whole("seed", self.seed, at_least=0)
        if self.bos is not None and not isinstance(self.bos, bool):
            raise OptionError(f"bos is {self.bos!r}; allowed: True, False or None.")
        if not isinstance(self.keep_duplicates, bool):
            raise OptionError(f"keep_duplicates is {self.keep_duplicates!r}; allowed: True or False.")


@dataclass(frozen=True, repr=False)
class PromptSet(Shown):
    """Prompts as token ids, in order, and where they came from.

    ``ids``: one tuple a prompt. ``source``: the name they were gathered from, "list" for a list.
    ``seed``: the one used. ``duplicates_removed``: how many prompts met on the way to these were
    left out because their ids were taken already.
    """

    ids: tuple[tuple[int, ...], ...]
    source: str
    seed: int
    duplicates_removed: int

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each prompt."""
        return tuple(map(len, self.ids))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of the ids in their order, and of nothing else; computed once.

        Each prompt enters as its length and then its ids, 8 bytes each, so that no two different
        sets share the bytes.
        """
        digest = sha256()
        for ids in self.ids:
            digest.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
        return digest.hexdigest()

    @property
    def provenance(self) -> dict[str, Any]:
        """Where the prompts came from, in plain json types; their ids are not in it."""
        return {
            "source": self.source,
            "seed": self.seed,
            "count": len(self.ids),
            "duplicates_removed": self.duplicates_removed,
            "fingerprint": self.fingerprint,
        }

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for json: the provenance, and the ids."""
        return self.provenance | {"ids": [list(ids) for ids in self.ids]}

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a prompt, for tables."""
        return [
            {"prompt": index, "tokens": len(ids), "token_ids": list(ids)}
            for index, ids in enumerate(self.ids)
        ]

    def to_dataframe(self) -> Any:
        """The rows as a DataFrame of pandas: one a prompt."""
        return dataframe(self.rows())

    def _line(self) -> str:
        lengths = f" of {min(self.lengths)} to {max(self.lengths)} tokens" if self.ids else ""
        left_out = f", {self.duplicates_removed:,} duplicates removed" if self.duplicates_removed else ""
        return f"{len(self):,} prompts{lengths} from {clip(self.source, 80)}, seed {self.seed}{left_out}"

    def _parts(self) -> Iterable[Markup]:
        yield table([row | {"token_ids": clip(str(row["token_ids"]), 100)} for row in self.rows()])


def check_whole(option: str, value: object, *, at_least: int) -> None:
    """Refuse a value of ``option`` that is no whole number from ``at_least`` on."""
    if not _is_int(value, at_least=at_least):
        raise OptionError(f"{option} is {value!r}; allowed: a whole number from {at_least}.")


def _is_int(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
