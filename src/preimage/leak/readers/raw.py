"""Raw numbers without a header: the axes of a file, held against its size, and one layer of it at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from preimage.errors import StatesError, shown

# By the names of observations; e5m2 is kept apart, as both are one byte of "fp8".
TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_CARRIERS = {1: np.int8, 2: np.int16, 4: np.int32}  # numpy has no bfloat16: bits are carried over as they are
_ALIGNED = 4096  # engines that write past the page cache fill up to a whole memory page
_MOST_TOKENS = 1 << 16  # a file; engines keep 16 to some thousands, and a layer of a file is read at once


@dataclass(frozen=True)
class RawPages:
    """A file that holds keys and values of some blocks and tokens, and nothing else.

    ``axes``: of every letter its size, in the order of the file, slowest first. L: blocks of the model.
    B: pages. N: tokens of a page. 2: keys, then values. H: heads. C: numbers of a head.
    """

    path: Path
    axes: Mapping[str, int]
    kind: str  # a name in TYPES
    scale: float = 1.0  # what fp8 codes are multiplied by

    @property
    def tokens(self) -> int:
        """How many tokens the file holds."""
        return self.axes["B"] * self.axes["N"]

    @property
    def bytes(self) -> int:
        """How large it is by its axes."""
        return math.prod(self.axes.values()) * TYPES[self.kind].itemsize

    def check(self, padded: bool = False) -> None:
        """Refuse a file that does not hold exactly these axes; ``padded``: or fills up a memory page."""
        if not 0 < self.tokens <= _MOST_TOKENS:
            raise StatesError(
                f"{shown(self.path.name)} would hold {self.tokens} tokens.",
                f"A file of 1..{_MOST_TOKENS} is read: check the model and the tokens a page.",
            )
        size = size_of(self.path)
        allowed = {self.bytes} | ({-(-self.bytes // _ALIGNED) * _ALIGNED} if padded else set())
        if size not in allowed:
            axes = " x ".join(f"{letter}={count}" for letter, count in self.axes.items())
            raise StatesError(
                f"{shown(self.path.name)} has {size} bytes; {axes} in {self.kind} are {self.bytes}.",
                "Check the model, the tokens a page and the type of the numbers; or the file is cut short.",
            )

    def block(self, index: int) -> Float[Tensor, "token two_widths"]:
        """Keys beside values of one block, counted from 0 in the file, in float32."""
        return torch.cat((self.part(index, 0), self.part(index, 1)), dim=1)

    def part(self, index: int, half: int) -> Float[Tensor, "token width"]:
        """Keys (half 0) or values (1) of one block, counted from 0 in the file, in float32."""
        carrier = np.dtype(_CARRIERS[TYPES[self.kind].itemsize]).newbyteorder("<")
        self.check(padded=True)  # it may have changed since
        try:
            whole = np.memmap(self.path, dtype=carrier, mode="r", shape=tuple(self.axes.values()))
        except (OSError, ValueError) as error:
            raise StatesError(
                f"{shown(self.path.name)} cannot be read: {type(error).__name__}.", "Check the file."
            ) from error
        letters = list(self.axes)
        one = whole.transpose([letters.index(letter) for letter in "L2BNHC"])[index, half]
        bits = np.array(one, dtype=carrier.newbyteorder("="), order="C").reshape(self.tokens, -1)
        numbers = torch.from_numpy(bits).view(TYPES[self.kind]).float()
        return numbers * self.scale if self.kind.startswith("fp8") else numbers


def is_file(path: Path) -> bool:
    """Whether it is a plain file, or a link to one; a name that no system takes is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def size_of(path: Path) -> int:
    """The size of a plain file, or a short error."""
    try:
        if path.is_file():
            return path.stat().st_size
    except (OSError, ValueError) as error:
        raise StatesError(f"{shown(path.name)} cannot be read.", "Check the path.") from error
    raise StatesError(f"{shown(path.name)} is not a file.", "Check the path.")


def stored_name(kind: str) -> str:
    """The type as observations name it."""
    return "fp8" if kind.startswith("fp8") else kind


def scale_note(kind: str, scale: float | None) -> tuple[str, ...]:
    """What to say of fp8 codes whose scale nobody told."""
    if not kind.startswith("fp8") or scale is not None:
        return ()
    return ("The scale of fp8 codes is not in the file; 1.0 is taken, as engines do without calibration.",)
