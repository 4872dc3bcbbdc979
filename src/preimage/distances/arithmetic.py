"""The arithmetics a screen can run in: how rows are rounded, how products are made, how sums may err.

Rows are rounded first, and what rounding changes is measured; a product of two rounded numbers is then exact
in float32 (tf32, bf16), so that only the sums err. Tensor cores cut sums off instead of rounding them: their
unit is taken as 2^-22. A CPU has no tensor cores and runs the same rounded rows in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_ALIGNED = 8  # columns of a row are a multiple of this: products are faster so
_TF32_BITS = 13  # last bits of a float32 that tf32 does not have


@dataclass(frozen=True)
class Arithmetic:
    """One way to make the products of a screen."""

    name: str
    storage: torch.dtype  # of the rounded rows
    sums: torch.dtype  # of the products and their sums
    unit: float  # largest relative error of one addition
    pieces: int  # numbers of the storage type that together hold a squared norm
    precision: str = "ieee"  # of float32 products, as torch calls it

    def rounded(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Float64 numbers, rounded to what this arithmetic multiplies exactly."""
        if self.precision != "tf32":
            return x.to(self.storage)
        bits = x.float().view(torch.int32)
        half = (1 << (_TF32_BITS - 1)) - 1 + ((bits >> _TF32_BITS) & 1)  # ties to even
        return ((bits + half) >> _TF32_BITS << _TF32_BITS).view(torch.float32)

    def width(self, d: int) -> int:
        """Columns of an augmented row."""
        return -(-(d + 2 * self.pieces) // _ALIGNED) * _ALIGNED

    def product(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        """left @ right^T, in these sums."""
        with products(self.precision):
            if self.storage == self.sums:
                return torch.mm(left, right.T, out=out)
            if left.device.type == "cpu":
                return torch.mm(left.to(self.sums), right.to(self.sums).T, out=out)
            return torch.mm(left, right.T, out_dtype=self.sums, out=out)


BF16 = Arithmetic("bf16", torch.bfloat16, torch.float32, 2.0**-22, 3)
TF32 = Arithmetic("tf32", torch.float32, torch.float32, 2.0**-22, 3, "tf32")
FLOAT32 = Arithmetic("float32", torch.float32, torch.float32, 2.0**-24, 1)
FLOAT64 = Arithmetic("float64", torch.float64, torch.float64, 2.0**-53, 1)
ARITHMETICS = {one.name: one for one in (BF16, TF32, FLOAT32, FLOAT64)}
# From the fastest to the finest, by the kind of device; the last always serves.
LADDERS = {"cpu": (FLOAT32, FLOAT64), "cuda": (BF16, TF32, FLOAT64)}


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Float32 products in one precision, whatever the user allowed elsewhere; put back afterwards."""
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        places[0].fp32_precision = precision
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
