"""The distance of two rows: float64 differences, squared and added in one order that is ours.

Torch's own reductions add in an order that depends on the number of rows, the layout, the instruction set
and the device, so that one pair has several last bits. Here the squares are added in halves, the second half
to the first, as if the row were filled up with zeros to a power of two. Every step is one elementwise
operation, which IEEE 754 rounds in one way on every machine (but torch's square root on a CPU: numpy's is
taken there). So a distance is a function of the two rows alone: the same bits in any batch, order and layout,
on a CPU and on a GPU, with zero columns appended, and from either end.

Rows whose largest difference is below 2^-400 or not below 2^400 are scaled by 2^600 or 2^-600 on the way, so
that rows which differ are never 0 apart and no square overflows. Numbers of fewer bits than float64 have no
such differences, and numbers that are not finite give what IEEE says.

|x|^2 + |y|^2 - 2 x.y is never used: in float32 it reports 0 for states that are apart.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from preimage.devices import by_device
from preimage.errors import StatesError

_TOGETHER = {"cpu": 2**17, "cuda": 2**25}  # numbers at once: on a CPU what stays in the cache
_NARROW = 16  # numbers of a row
_LOW, _HIGH, _BY = 2.0**-400, 2.0**400, 2.0**600
_WHOLE = 2**53  # up to here every integer is a float64
UNIT = 2.0**-53  # largest relative error of one float64 operation


@torch.no_grad()
def row_distances(x: Shaped[Tensor, "*rows d"], y: Shaped[Tensor, "*other d"]) -> Float[Tensor, "*result"]:
    """|x_i - y_i|_2 in float64; leading axes broadcast.

    Off the true distance by at most :func:`relative_error`; 0 only where the rows are equal.
    """
    if x.shape[-1] != y.shape[-1]:
        raise StatesError(
            f"Rows of {x.shape[-1]} and {y.shape[-1]} numbers have no distance.",
            "Give rows of the same width.",
        )
    rows, others = torch.broadcast_tensors(real(x), real(y))
    distances = _lengths(rows, others)
    if torch.float64 in (rows.dtype, others.dtype):
        _require_held(distances, rows, others)
    return distances


@torch.no_grad()
def norms(x: Shaped[Tensor, "*rows d"], *, held: bool = True) -> Float[Tensor, "*rows"]:
    """|x_i|_2 in float64: the distance from 0. Unless ``held``, it is infinite where float64 ends."""
    rows = real(x)
    lengths = _lengths(rows, None)
    if held and rows.dtype == torch.float64:
        _require_held(lengths, rows, rows)
    return lengths


@torch.no_grad()
def city_block(x: Shaped[Tensor, "*rows d"], y: Shaped[Tensor, "*other d"]) -> Float[Tensor, "*result"]:
    """The sum of |x_i - y_i| in float64; leading axes broadcast. What some published baselines compare by."""
    return (real(x).double() - real(y).double()).abs().sum(dim=-1)


def relative_error(d: int) -> float:
    """What a distance of rows of d numbers, or a norm, may be off by, relative to the true one.

    Differences, squares and a tree of log2(d) levels: at most log2(d) + 3 roundings of a sum of squares, half
    of that for its root, and one more; squares that underflow are smaller than that by far. Distances below
    2.3e-308, of which float64 keeps fewer digits, are off by half of its smallest number more.
    """
    return (max(0, d - 1).bit_length() + 6) * UNIT


def real(x: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Floating-point numbers as they are, booleans and integers as float64.

    Refuses complex numbers, and integers that float64 cannot hold.
    """
    if x.is_floating_point():
        return x if x.element_size() > 1 else x.float()  # eight bits: few operations take them
    if x.is_complex():
        raise StatesError(
            f"These rows are complex ({x.dtype}); distances are of real numbers.",
            "Give their real and imaginary parts side by side (torch.view_as_real).",
        )
    if x.element_size() == 8 and x.numel():
        whole = x.view(torch.int64)  # an unsigned one above 2^63 is negative here
        low = 0 if x.dtype == torch.uint64 else -_WHOLE
        if int(whole.amin()) < low or int(whole.amax()) > _WHOLE:
            raise StatesError(
                f"These rows hold integers beyond 2^53 ({x.dtype}), which float64 cannot tell apart.",
                "Give integers up to 2^53, or take a common offset off first.",
            )
    return x.to(torch.float64)


def _lengths(x: Tensor, y: Tensor | None) -> Tensor:
    """|x - y| over the last axis of two tensors of one shape, or |x|, in pieces."""
    most = by_device(_TOGETHER, x.device)
    if x.numel() <= most or x.ndim == 1:
        return _length(x, y)
    if len(x) == 1:
        return _lengths(x[0], None if y is None else y[0])[None]
    size = max(1, len(x) * most // x.numel())
    parts = [slice(start, start + size) for start in range(0, len(x), size)]
    return torch.cat([_lengths(x[part], None if y is None else y[part]) for part in parts])


def _length(x: Tensor, y: Tensor | None) -> Tensor:
    left = x.to(torch.float64, copy=True)
    if y is not None:
        left -= y
    if left.shape[-1] == 0:
        return left.new_zeros(left.shape[:-1])
    if torch.float64 not in (x.dtype, x.dtype if y is None else y.dtype):
        return _root(_sum(left.mul_(left)))
    largest = left.abs().amax(dim=-1)
    by = torch.ones_like(largest).masked_fill_(largest < _LOW, _BY).masked_fill_(largest >= _HIGH, 1 / _BY)
    left *= by[..., None]
    return _root(_sum(left.mul_(left))).div_(by)


def _sum(x: Tensor) -> Tensor:
    """The sum over the last axis in halves; x is overwritten.

    x_k + x_(k + h), where h is the largest power of two below the width, until one number is left.
    """
    axis, width = x.ndim - 1, x.shape[-1]
    while width > 1:
        if axis and width <= _NARROW:  # few numbers of many rows: the rows are laid side by side, for speed
            x, axis = x.narrow(-1, 0, width).movedim(-1, 0).contiguous(), 0
        half = 1 << ((width - 1).bit_length() - 1)
        x.narrow(axis, 0, width - half).add_(x.narrow(axis, half, width - half))
        width = half
    return x.select(axis, 0)


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded: torch calls MKL's on a CPU, one in 140 of which is an ulp off."""
    return torch.as_tensor(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _require_held(distances: Tensor, x: Tensor, y: Tensor) -> None:
    """Refuse an infinite distance of rows that are finite."""
    if not bool(torch.isinf(distances).any()):
        return
    beyond = torch.isinf(distances) & torch.isfinite(x).all(dim=-1) & torch.isfinite(y).all(dim=-1)
    if bool(beyond.any()):
        raise StatesError(
            "These rows are farther apart than float64 can say (1.8e308).", "Give numbers up to 1e150."
        )
