"""What files of states hold: which engine wrote them, what stands in the clear, and what was seen of prompts.

A reader makes a :class:`Holding` of a file, or of files that belong together. Nothing large is read for it:
states are read when they are asked for, and what a file claims is held against its size before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from preimage.observations import Observation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Of the model that is thought to have made files: what raw pages do not say themselves."""

    n_layers: int
    d_model: int
    heads: int  # of keys and values
    head_size: int
    vocab_size: int

    @property
    def width(self) -> int:
        """Numbers that the keys of one block have of one token, and so the values."""
        return self.heads * self.head_size


@dataclass(frozen=True)
class Told:
    """What the user says of files, where they do not say it; None: recognised, or asked for by name.

    ``stored``: the type of the numbers (float32, bf16, fp16, fp8). ``order``: the axes of a raw page.
    ``page``: tokens a page. ``rotary``: keys ``after`` or ``before`` rotary positions. ``scale``: what fp8
    codes are multiplied by. ``sizes``: of the model, where one is known. ``layers``: those that a
    file of hidden states holds, in its order; of a file that holds one, that one alone.
    """

    stored: str | None = None
    order: str | None = None
    page: int | None = None
    rotary: str | None = None
    scale: float | None = None
    sizes: Sizes | None = None
    layers: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Clear:
    """Token ids or text that stand in a file as they are: whoever has the file needs no model."""

    where: str  # in words: "the tensor token_ids", "the header"
    token_ids: tuple[int, ...] | None = None
    text: str | None = None


@dataclass(frozen=True)
class BlockName:
    """A name that was computed from token ids, and with which they can be checked."""

    scheme: str  # a name in leak/block_hashes.py:SCHEMES
    digest: bytes  # whole, or its first bytes where the engine keeps no more
    page: int | None  # tokens a block, where that is known


@dataclass(frozen=True)
class Seen:
    """What was seen at one place of the model: position x width, read when it is asked for."""

    layer: int | str
    observation: Observation
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Piece:
    """One prompt, or a page of one: all that is known of the same tokens in a row."""

    name: str  # how people find it: a file, a row, a request
    tokens: int | None  # how many; None where the file does not say
    start: int | None = 0  # where in its prompt it begins; None: not known
    seen: tuple[Seen, ...] = ()
    clear: tuple[Clear, ...] = ()
    block: BlockName | None = None


@dataclass(frozen=True)
class Holding:
    """A file, or files that belong together, by what wrote them."""

    paths: tuple[Path, ...]
    kind: str  # "vLLM hidden states", "LMCache chunk" …
    about: str  # one sentence: what it holds, by whom, how it was recognised
    pieces: tuple[Piece, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what a reviewer should know: assumptions, what was left out
