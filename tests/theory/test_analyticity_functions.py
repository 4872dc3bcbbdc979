"""Functions that hide a kink are seen, whatever they are written in and wherever a hook applies them."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.attacks import attacked, second


def _by_item(x: Tensor) -> Tensor:
    return x * 2 if float(x.mean()) > 0 else x


def _by_list(x: Tensor) -> Tensor:
    return torch.tensor([[[max(v, 0.0) for v in row] for row in rows] for rows in x.tolist()])


def _by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.maximum(x.numpy(), 0))


def _by_array(x: Tensor) -> Tensor:
    return torch.as_tensor(np.abs(np.asarray(x)))


def _by_memory(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    ctypes.memmove(out.data_ptr(), x.contiguous().data_ptr(), x.numel() * 4)
    return out


def _by_dlpack(x: Tensor) -> Tensor:
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))


def _elsewhere(x: Tensor) -> Tensor:
    """In a thread, which the modes of torch do not reach."""
    found: list[Tensor] = []
    worker = threading.Thread(target=lambda: found.append(x.abs()))
    worker.start()
    worker.join()
    return found[0]


def _unseen(x: Tensor) -> Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return x.abs()


def _by_storage(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out.untyped_storage().copy_(x.abs().contiguous().untyped_storage())
    return out


def _each(x: Tensor) -> Tensor:
    return x.clone().apply_(lambda v: max(v, 0.0))


def _assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = 0
    return y


def _through_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x.abs()
    return y


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., :3].relu_()
    return y


def _out(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.abs(x, out=y)
    return y


def _bits(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & 0x7FFFFFFF).view(torch.float32)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.abs()


@torch.library.custom_op("preimage_tests::kink", mutates_args=())
def _kink(x: Tensor) -> Tensor:
    return x.abs()


@torch.library.custom_op("preimage_tests::kink_in_place", mutates_args=("x",))
def _kink_in_place(x: Tensor) -> None:
    x.abs_()


def _custom_in_place(x: Tensor) -> Tensor:
    y = x.clone()
    _kink_in_place(y)
    return y


def _long(x: Tensor) -> Tensor:
    length = x.shape[1]
    if length > 100:
        x = x.clamp(min=0)
    return x * 2


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


def _routed(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in (x.sum(-1) > 0).nonzero():
        out[row[0], row[1]] = x[row[0], row[1]]
    return out


def _cached(x: Tensor) -> Tensor:
    return x * _CACHE


_CACHE = torch.ones(32)


class _Wrapped(Tensor):
    """A tensor that computes by rules of its own, below torch's modes."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapped:
        made: _Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].inner.abs()


HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "complex abs": lambda x: (
        torch.view_as_complex(x.view(*x.shape[:-1], 16, 2).contiguous()).abs().repeat(1, 1, 2)
    ),
    "product with a comparison": lambda x: x * (x > 0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "root of a square": lambda x: (x * x).sqrt(),
    "power of a power": lambda x: x.pow(2).pow(0.5),
    "quotient by its size": lambda x: x / x.norm(dim=-1, keepdim=True),
    "quotient by 0": lambda x: torch.nan_to_num(x / 0.0, posinf=1.0, neginf=-1.0),
    "times infinity": lambda x: torch.nan_to_num(x * math.inf),
    "overflow": lambda x: torch.where(torch.isinf(torch.exp(x * 1e30)), 0.0, x),
    "largest so far": lambda x: x.cummax(-1).values,
    "largest": lambda x: x - x.amax(-1, keepdim=True),
    "shift of other rows": lambda x: (x - x.amax(-1, keepdim=True)).mT.softmax(-1).mT,
    "shift along another dimension": lambda x: (x - x.amax(-1, keepdim=True)).softmax(-2),
    "half a shift": lambda x: ((x - x.amax(-1, keepdim=True)) * x).softmax(-1),
    "complex power": lambda x: torch.exp(torch.complex(x, x)).real.log(),
    "sum of nothing": lambda x: x + x.exp()[..., :0].sum(-1, keepdim=True).sqrt(),
    "sorted": lambda x: x.sort(-1).values,
    "rounded": lambda x: x.round(),
    "remainder": lambda x: x % 1.0,
    "integers": lambda x: x.int().float(),
    "few bits": lambda x: x.to(torch.float8_e4m3fn).float(),
    "bits": _bits,
    "logarithm": lambda x: x.log(),
    "clamped": lambda x: x.clamp(-1, 1),
    "thresholds": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)).float(),
    "pieces": nn.functional.hardswish,
    "elu": nn.functional.elu,
    "lists of tensors": lambda x: torch._foreach_abs([x])[0],
    "mapped": torch.vmap(torch.relu),
    "assigned": _assigned,
    "through data": _through_data,
    "part in place": _in_place,
    "out": _out,
    "branch": _by_item,
    "loop": _routed,
    "list": _by_list,
    "numpy": _by_numpy,
    "array": _by_array,
    "memory": _by_memory,
    "dlpack": _by_dlpack,
    "storage": _by_storage,
    "each entry": _each,
    "thread": _elsewhere,
    "modes off": _unseen,
    "autograd function": _Function.apply,
    "custom operation": _kink,
    "custom operation in place": _custom_in_place,
    "script": _scripted,
    "subclass": lambda x: _Wrapped(x) + 0,
    "tensor of unknown origin": _cached,
    "random": lambda x: x + torch.randn_like(x),
    "uninitialised": lambda x: x + torch.empty(32),
    "other lengths": _long,
    "scatter": lambda x: torch.zeros_like(x).scatter_reduce(
        -1, torch.zeros_like(x, dtype=torch.long), x, "amax"
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hook_may_do_anything_and_is_seen(name: str) -> None:
    def attack(module: nn.Module) -> None:
        second(module).mlp.register_forward_hook(lambda _m, _a, output: HIDDEN[name](output))

    holds, breaks = attacked(attack)
    assert holds is not True
    assert any("layers.1" in row["first"] for row in breaks), breaks
