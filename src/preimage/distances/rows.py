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

from preimage.devices import by_device
from preimage.distances.direct import real
from preimage.errors import OptionError, StatesError

LARGEST = 1e150  # of a coordinate: squares, and sums of many, stay far from the end of float64
_ROWS = {"cpu": 512, "cuda": 8192}  # looked at together
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowSet:
    """Rows, and which of them are equal.

    ``same``: for each row the first that equals it. ``firsts``: the first row of every group of equal rows,
    alone or not; ``repeats``: all others. ``distinct``: the rows at ``firsts``.
    """

    def __init__(self, x: Shaped[Tensor, "row d"]) -> None:
        self.x = x = real(x.detach())
        if x.shape[1] == 0:
            raise OptionError(f"These {len(x)} rows hold no numbers.", "Give rows at least 1 wide.")
        require_finite(x)
        _require_held(x)
        self.same = same_rows(x)
        first = self.same == torch.arange(len(x), device=x.device)
        self.firsts, self.repeats = first.nonzero().flatten(), (~first).nonzero().flatten()
        self.distinct = x if len(self.firsts) == len(x) else x[self.firsts]

    @cached_property
    def sizes(self) -> Int[Tensor, " distinct"]:
        """How many rows each distinct one stands for."""
        return self.same.bincount(minlength=len(self.x))[self.firsts]

    @cached_property
    def _groups(self) -> dict[int, list[int]]:
        return equal_row_groups(self.same)

    def group(self, first: int) -> list[int]:
        """All rows equal to the first of a group."""
        return self._groups.get(first, [first])

    def groups(self) -> list[list[int]]:
        """Every group of more than one row, in the order of its first."""
        return list(self._groups.values())

    def equal_pairs(self, k: int) -> list[tuple[int, int]]:
        """The first k pairs of equal rows, by their first row, then by their second."""
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
    size = by_device(_ROWS, x.device)
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
    size = by_device(_ROWS, x.device)
    for start in range(0, len(x), size):
        largest = x[start : start + size].abs().amax(dim=1)
        if float(largest.max()) > LARGEST:
            row = int((largest > LARGEST).nonzero()[0])
            raise StatesError(
                f"row {start + row} holds a number of size {float(largest[row]):.3g}; "
                f"distances are certified up to {LARGEST:g}.",
                "Scale the rows down: by a power of two nothing is lost.",
            )


def same_rows(x: Float[Tensor, "row d"]) -> Int[Tensor, " row"]:
    """For each row the first row that equals it to the bit, itself if there is none; -0.0 counts as 0.0."""
    if not len(x):
        return torch.empty(0, dtype=torch.long, device=x.device)
    size, order = by_device(_ROWS, x.device), torch.arange(len(x), device=x.device)
    keys = torch.cat([_hash(part) for part in x.split(size)])
    _, group = keys.unique(return_inverse=True)
    first = torch.full((len(x),), len(x), device=x.device)
    first.scatter_reduce_(0, group, order, "amin")
    same = first[group]
    for part in (same != order).nonzero().flatten().split(size):
        if not torch.equal(x[part], x[same[part]]):  # two rows with one hash: compare them in full
            return _same_rows_in_full(x)
    return same


def equal_row_groups(same: Int[Tensor, " row"]) -> dict[int, list[int]]:
    """The groups of more than one equal row, by their first and in its order; ``same``: of same_rows."""
    repeats = (same != torch.arange(len(same), device=same.device)).nonzero().flatten()
    groups: dict[int, list[int]] = {}
    for row, first in zip(repeats.tolist(), same[repeats].tolist(), strict=True):
        groups.setdefault(first, [first]).append(row)
    return dict(sorted(groups.items()))


def count_equal_pairs(same: Int[Tensor, " row"]) -> int:
    """How many pairs of rows are equal; ``same``: of same_rows."""
    sizes = same.bincount()
    return int((sizes * (sizes - 1) // 2).sum())


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
