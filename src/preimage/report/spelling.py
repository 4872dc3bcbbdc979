"""Token ids as text, by a model's own tokenizer where it is on this disk; weights are never loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from preimage.models import tokenizer_here

_LONGEST = 4  # tokens of one character, at most: its bytes
_WORD = re.compile(r"\s*\S+|\s+")


class Speller:
    """Spells the tokens of one model; where its tokenizer is not here, numbers stand for them."""

    def __init__(self, model: Mapping[str, Any] | None) -> None:
        self._tokenizer = _tokenizer(str(model["name"])) if model and model.get("name") else None

    def one(self, token: int) -> str:
        """A token by itself."""
        return self._decoded([token]) or str(token)

    def pieces(self, ids: Sequence[int], text: str | None = None) -> list[str]:
        """The text of every token, as it stands behind the one before; of tokens that only together are a
        character, the last has it.

        ``text``: what the ids were known to say when the result was made. A tokenizer that says otherwise is
        another one by now, and is not believed: numbers stand for the tokens.
        """
        if self._tokenizer is None or (text is not None and self._decoded(ids) != text):
            return [f"{token} " for token in ids]
        pieces: list[str] = []
        begun = 0  # where the character begins that a token may end: one can take several
        for at in range(len(ids)):
            start = max(0, begun - 1)
            before, both = self._decoded(ids[start:begun]), self._decoded(ids[start : at + 1])
            unended = both.endswith("\ufffd") and at - begun < _LONGEST and at + 1 < len(ids)
            if unended:
                pieces.append("")
                continue
            behind = both.startswith(before)
            pieces.append(both.removeprefix(before) if behind else self._decoded(ids[begun : at + 1]))
            begun = at + 1
        return pieces

    def knows(self, ids: Sequence[int], text: str | None) -> bool:
        """Whether these ids are spelled, and not numbered."""
        return self._tokenizer is not None and (text is None or self._decoded(ids) == text)

    def _decoded(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        try:
            return str(self._tokenizer.decode(list(ids)))
        except (OverflowError, TypeError):  # an id that is none
            return ""


def words(text: str) -> list[str]:
    """A text in words, each with the space before it."""
    return _WORD.findall(text)


@cache
def _tokenizer(name: str) -> Any:
    return tokenizer_here(name)
