"""Rows that are the same to the bit, found by hashing; a distance is never asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from heapq import merge
from itertools import combinations, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from preimage.distances.direct import real
from preimage.errors import OptionError, StatesError

LARGEST = 1e150  # of a coordinate: squares, and sums of many, stay far from the end of float64
_ROWS = {"cpu": 512, "cuda": 8192}  # looked at together
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowSet:
    """Rows, and which of them are the same."""

    def __init__(self, x: Shaped[Tensor, "row d"]) -> None:
        self.x = x = real(x.detach())
        if x.shape[1] == 0:
            raise OptionError(f"These {len(x)} rows hold no numbers.", "Give rows at least 1 wide.")
        require_finite(x)
        _require_held(x)
        self.same = same_rows(x)
        order = torch.arange(len(x), device=x.device)
        self.kept = (self.same == order).nonzero().flatten()  # the first of every group
        self.twins = (self.same != order).nonzero().flatten()  # the others
        self.first = x if len(self.kept) == len(x) else x[self.kept]

    @cached_property
    def sizes(self) -> Int[Tensor, " kept"]:
        """How many rows each kept one stands for."""
        return self.same.bincount(minlength=len(self.x))[self.kept]

    @cached_property
    def _groups(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for twin, first in zip(self.twins.tolist(), self.same[self.twins].tolist(), strict=True):
            groups.setdefault(first, [first]).append(twin)
        return groups

    def group(self, first: int) -> list[int]:
        """All rows that are the same as the first of a group."""
        return self._groups.get(first, [first])

    def groups(self) -> list[list[int]]:
        """Every group of more than one row, in the order of its first."""
        return [self._groups[first] for first in sorted(self._groups)]

    def twin_pairs(self, k: int) -> list[tuple[int, int]]:
        """The first k pairs of rows that are the same, by their first row, then by their second."""
        return list(islice(merge(*(combinations(group, 2) for group in self.groups())), k))


def as_rows(vectors: Tensor | np.ndarray | Sequence[Any]) -> Shaped[Tensor, "row d"]:
    """Rows as people have them, as a tensor; Python's own floats stay float64."""
    if not isinstance(vectors, Tensor):
        try:
            array = np.asarray(vectors)
            # in this machine's byte order, and no axis backwards: torch takes nothing else
            vectors = torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
        except (TypeError, ValueError, OverflowError) as error:
            raise StatesError(
                f"These vectors cannot be compared: {error}",
                "Give rows of one width, of floats, integers or booleans.",
            ) from error
    if vectors.ndim != 2:
        raise OptionError(f"These vectors have {vectors.ndim} axes.", "Give rows x width.")
    return vectors


def require_finite(x: Float[Tensor, "row d"], what: str = "row") -> None:
    """Refuse NaN and infinity, naming the row."""
    size = _size(x)
    for start in range(0, len(x), size):
        part = x[start : start + size]
        if bool(torch.isfinite(part.sum(dtype=torch.float64))):  # what is not finite carries through a sum
            continue
        bad = (~torch.isfinite(part).all(dim=1)).nonzero()
        if len(bad):
            raise StatesError(
                f"{what} {start + int(bad[0])} holds NaN or infinity.", "Leave it out or capture it again."
            )


def _require_held(x: Float[Tensor, "row d"]) -> None:
    """Refuse numbers whose squares would leave float64, naming the row."""
    if x.dtype != torch.float64:
        return  # other types end long before
    for start in range(0, len(x), _size(x)):
        largest = x[start : start + _size(x)].abs().amax(dim=1)
        if float(largest.max()) > LARGEST:
            row = int((largest > LARGEST).nonzero()[0])
            raise StatesError(
                f"row {start + row} holds a number of size {float(largest[row]):.3g}; "
                f"distances are certified up to {LARGEST:g}.",
                "Scale the rows down: by a power of two nothing is lost.",
            )


def same_rows(x: Float[Tensor, "row d"]) -> Int[Tensor, " row"]:
    """For each row the first row that equals it to the bit, itself if there is none; -0.0 counts as 0.0."""
    keys = (
        torch.cat([_hash(part) for part in x.split(_size(x))]) if len(x) else x.new_empty(0, dtype=torch.long)
    )
    _, group = keys.unique(return_inverse=True)
    first = torch.full((len(x),), len(x), device=x.device)
    first.scatter_reduce_(0, group, torch.arange(len(x), device=x.device), "amin")
    same = first[group]
    moved = (same != torch.arange(len(x), device=x.device)).nonzero().flatten()
    for part in moved.split(_size(x)):
        if not torch.equal(x[part], x[same[part]]):  # two rows with one hash: compare them in full
            return _same_rows_in_full(x)
    return same


def _size(x: Tensor) -> int:
    return _ROWS.get(x.device.type, _ROWS["cpu"])


def _hash(x: Tensor) -> Tensor:
    """A sum of the row's bits, as integers, with random odd weights, modulo 2^64."""
    bits = (x + 0.0).contiguous().view(_INTEGERS[x.element_size()])
    generator = torch.Generator().manual_seed(0x5EED)
    weights = torch.randint(-(2**62), 2**62, (x.shape[1],), generator=generator).to(x.device) * 2 + 1
    return (bits.to(torch.int64) * weights).sum(dim=1)


def _same_rows_in_full(x: Tensor) -> Tensor:
    seen: dict[bytes, int] = {}
    rows = (x + 0.0).cpu().contiguous().view(_INTEGERS[x.element_size()]).numpy()
    return torch.tensor([seen.setdefault(row.tobytes(), i) for i, row in enumerate(rows)], device=x.device)
