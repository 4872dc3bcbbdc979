"""Rows that are the same to the bit, found by hashing; a distance is never asked."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from preimage.errors import StatesError

_ROWS = 8192  # hashed at once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_finite(x: Float[Tensor, "row d"], what: str = "row") -> None:
    """Refuse NaN and infinity, naming the row."""
    for start in range(0, len(x), _ROWS):
        part = x[start : start + _ROWS]
        bad = (~torch.isfinite(part).all(dim=1)).nonzero()
        if len(bad):
            raise StatesError(
                f"{what} {start + int(bad[0])} holds NaN or infinity.", "Leave it out or capture it again."
            )


def same_rows(x: Float[Tensor, "row d"]) -> Int[Tensor, " row"]:
    """For each row the first row that equals it to the bit, itself if there is none; -0.0 counts as 0.0."""
    keys = torch.cat([_hash(part) for part in x.split(_ROWS)]) if len(x) else x.new_empty(0, dtype=torch.long)
    _, group = keys.unique(return_inverse=True)
    first = torch.full((len(x),), len(x), device=x.device)
    first.scatter_reduce_(0, group, torch.arange(len(x), device=x.device), "amin")
    same = first[group]
    moved = (same != torch.arange(len(x), device=x.device)).nonzero().flatten()
    for part in moved.split(_ROWS):
        if not torch.equal(x[part], x[same[part]]):  # two rows with one hash: compare them in full
            return _same_rows_in_full(x)
    return same


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
