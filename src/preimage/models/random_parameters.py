"""The same module at generic parameters: a point that almost every theta is like.

The module is copied as it stands, not built anew from its config: parts that were replaced, hooks, forwards
set on an instance and a custom attention come along, because what they do is part of the map. What is decided
by a random draw needs float64 from end to end (see ``doubling``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from preimage.devices import free_bytes
from preimage.errors import ModelError, PreimageError
from preimage.models.float64 import DoubleModel, Float64Throughout
from preimage.models.language_model import LanguageModel
from preimage.models.offloaded import unhooked

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, type, FunctionType)
_KERNELS = ("flash", "flex", "paged")  # attention that knows no float64; eager is the same map


def random_parameters(model: LanguageModel, seed: int = 0, *, head: bool = True) -> DoubleModel:
    """A float64 copy on the CPU of the very module, every parameter drawn anew from a Gaussian.

    Embeddings, position tables, attention sinks, gains and biases have unit variance, matrices keep the size
    of what passes through them: nothing is left at 0, 1 or any other special value. Tied matrices stay tied.
    Everything that is no parameter is kept: hooks, replaced parts, forwards of instances (with the parts of
    the model that their closures hold), buffers. Linear parts in a few bits become plain ones. The model
    itself is not touched, and what hooks write into lists of their own they write into copies. There is no
    tokenizer: ids mean nothing to these parameters.

    ``head``: copy what is above the backbone too. Cost: 8 bytes a parameter, and the time to draw them.
    Raises ``ModelError`` where the module cannot be copied, or cannot run in float64 on the CPU.
    """
    copied = model.module if head else model.anatomy.backbone
    with copying(copied):
        require_memory(sum(math.prod(shape) for shape, _ in sizes(copied).values()))
        module = copy_module(copied, _drawn(copied, torch.Generator().manual_seed(seed)))
        with Float64Throughout():
            return DoubleModel(module, None, name=f"{model.name}, random parameters {seed}")


@contextmanager
def copying(module: nn.Module) -> Iterator[None]:
    """Whatever goes wrong inside is told as one ``ModelError``."""
    try:
        with unhooked(module):
            yield
    except PreimageError:
        raise
    except Exception as error:  # many kinds, one line
        raise ModelError(
            f"{type(module).__name__} cannot be copied at random parameters: {error}",
            "Use a module that copy.deepcopy can copy.",
        ) from error


def sizes(module: nn.Module) -> dict[int, tuple[tuple[int, ...], float]]:
    """Shape and standard deviation of every parameter that is to be drawn, by the parameter's id."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    packed = {id(part.weight): (part.out_features, part.in_features) for part in _packed(module)}
    deviations: dict[int, tuple[tuple[int, ...], float]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() and id(parameter) not in packed:
            raise ModelError(
                f"{name} of {type(module).__name__} is stored as {parameter.dtype} and cannot be drawn anew.",
                "Load the model without quantisation.",
            )
        shape = packed.get(id(parameter), tuple(parameter.shape))
        whole = len(shape) < 2 or id(parameter) in tables
        deviations[id(parameter)] = (shape, 1.0 if whole else 1 / math.sqrt(shape[-1]))
    return deviations


def _drawn(module: nn.Module, generator: torch.Generator) -> dict[int, Any]:
    """What stands in the copy for each parameter, by the parameter's id."""
    drawn: dict[int, Any] = {}
    for place, (shape, deviation) in sizes(module).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn[place] = nn.Parameter(noise.mul_(deviation), requires_grad=False)
    return drawn


def require_memory(numbers: int, device: torch.device | None = None) -> None:
    """Refuse a copy of so many float64 numbers where they do not fit, as far as the system tells."""
    free = free_bytes(device or torch.device("cpu"))
    if free is not None and 8 * numbers > free:
        raise ModelError(
            f"A copy in float64 takes {8 * numbers / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free.",
            "Free memory, or use a smaller model.",
        )


def _packed(module: nn.Module) -> list[nn.Linear]:
    """Linear parts stored in a few bits, whose numbers lie packed in integers."""
    linear = (part for part in module.modules() if isinstance(part, nn.Linear))
    return [part for part in linear if not part.weight.is_floating_point()]


def copy_module(module: nn.Module, memo: dict[int, Any], device: torch.device | str = "cpu") -> nn.Module:
    """A deep copy with what ``memo`` has for an id in the place of its original, in float64 on ``device``.

    ``memo`` is filled on the way with the copy of every part.
    """
    parts = {id(part): part for part in module.modules()}
    functions = _Functions(parts)
    for part in parts.values():
        for value in (*part._buffers.values(), *vars(part).values()):
            _keep(value, memo, device)
            held = value.values() if isinstance(value, dict) else (value,)  # hooks, or set on the instance
            for one in held:
                functions.find(one, memo)
    copied = copy.deepcopy(module, memo)
    functions.fill(memo, device)
    for part in _packed(module):
        memo[id(part)].__class__ = nn.Linear  # of real numbers now
    for part in copied.modules():
        config: Any = getattr(part, "config", None)
        if str(getattr(config, "_attn_implementation", "")).startswith(_KERNELS):
            config._attn_implementation = "eager"
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # type: ignore[operator]  # grouped products know no float64
    return copied


class _Functions:
    """Copies of hooks and of forwards set on an instance, which hold the copied parts of the model.

    ``copy.deepcopy`` takes functions for constants: a copied hook would go on calling the original. A
    function holds things in its closure, in its default arguments and, in a script, in the globals it names.
    """

    def __init__(self, parts: dict[int, nn.Module]) -> None:
        self._parts = parts
        self._copies: list[tuple[FunctionType, FunctionType]] = []

    def find(self, value: object, memo: dict[int, Any]) -> None:
        """Make an empty copy of a function, and of every function it holds, if any part can be reached."""
        if not isinstance(value, FunctionType) or id(value) in memo or not self._reaches(value, set()):
            return
        cells = tuple(CellType() for _ in value.__closure__ or ())
        twin = FunctionType(value.__code__, dict(value.__globals__), value.__name__, closure=cells)
        memo[id(value)] = twin
        self._copies.append((value, twin))
        for held in (*_held(value), *_neighbours(value)):
            self.find(held, memo)

    def fill(self, memo: dict[int, Any], device: torch.device | str) -> None:
        """Give every copy what its original holds, copied, once the module itself has been copied."""
        for function, twin in self._copies:
            for held in _held(function):
                _keep(held, memo, device)
            twin.__defaults__ = copy.deepcopy(function.__defaults__, memo)
            twin.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
            for place, held in _cells(function).items():
                (twin.__closure__ or ())[place].cell_contents = copy.deepcopy(held, memo)
            for name in _named(function.__code__) & function.__globals__.keys():
                held = function.__globals__[name]
                if isinstance(held, Tensor):
                    _keep(held, memo, device)
                if id(held) in memo or self._is_part(held):
                    twin.__globals__[name] = copy.deepcopy(held, memo)

    def _reaches(self, function: FunctionType, seen: set[int]) -> bool:
        """Whether a function holds anything that differs in the copy; a library's own do not."""
        seen.add(id(function))
        named = [function.__globals__.get(name) for name in _named(function.__code__)]
        if any(not isinstance(held, _CONSTANTS) for held in _held(function)):
            return True
        if any(isinstance(held, Tensor) or self._is_part(held) for held in named):
            return True
        further = [*_held(function), *_neighbours(function)]
        return any(
            self._reaches(held, seen)
            for held in further
            if isinstance(held, FunctionType) and id(held) not in seen
        )

    def _is_part(self, held: object) -> bool:
        return id(held) in self._parts or id(getattr(held, "__self__", None)) in self._parts


def _cells(function: FunctionType) -> dict[int, Any]:
    """What the closure holds, by place; a cell may still be empty."""
    contents = {}
    for place, cell in enumerate(function.__closure__ or ()):
        with suppress(ValueError):
            contents[place] = cell.cell_contents
    return contents


def _held(function: FunctionType) -> list[Any]:
    """What a function holds in its closure and its default arguments."""
    named = (function.__kwdefaults__ or {}).values()
    return [*_cells(function).values(), *(function.__defaults__ or ()), *named]


def _neighbours(function: FunctionType) -> list[FunctionType]:
    """The functions that it names of those written beside it."""
    named = (function.__globals__.get(name) for name in _named(function.__code__))
    beside = (held for held in named if isinstance(held, FunctionType))
    return [held for held in beside if held.__globals__ is function.__globals__]


def _named(code: CodeType) -> set[str]:
    """The names that code looks up, those of the functions inside it too."""
    inner = (_named(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _keep(value: object, memo: dict[int, Any], device: torch.device | str) -> None:
    """Enter a tensor that is no parameter: its values, in float64 where they are real numbers."""
    if isinstance(value, Tensor) and id(value) not in memo:
        kind = value.dtype
        if value.is_floating_point() or value.is_complex():
            kind = torch.float64 if value.is_floating_point() else torch.complex128
        memo[id(value)] = value.detach().to(device, kind, copy=True)
