"""Models that accelerate spread over devices, memory and disk (``device_map``).

Weights that do not stay on their device are on ``meta``: a hook brings them in for the pass of their part,
from tensors in memory or from files. Nothing here imports accelerate; its hooks are known by their class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from preimage.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_HOOKS = "accelerate.hooks"
_ADDED = ("forward", "_old_forward", "_hf_hook", "to", "cuda")  # to a part, by accelerate


class Offloaded(NamedTuple):
    """Where a hook finds a parameter: a map of weights, and the name it has there."""

    weights: Mapping[str, Tensor]
    name: str

    def read(self, like: Tensor) -> Tensor:
        """The parameter in full, in the dtype of what stands in its place."""
        return self.weights[self.name].to(like.dtype)

    @property
    def held(self) -> Tensor | None:
        """The tensor in memory that it is read from; None where that is a file."""
        weights, name = self._innermost
        tensor: Tensor | None = getattr(weights, "state_dict", weights).get(name)
        return tensor

    @property
    def file(self) -> Path | None:
        """The file that it is read from; None where that is a tensor in memory."""
        weights, name = self._innermost
        about = getattr(weights, "index", {}).get(name)
        if about is None or self.held is not None:
            return None
        return Path(about.get("safetensors_file") or f"{weights.save_folder}/{name}.dat")

    @property
    def _innermost(self) -> tuple[Any, str]:
        """The map that others only add a prefix to."""
        weights, name = self
        while hasattr(weights, "dataset"):
            weights, name = weights.dataset, f"{weights.prefix}{name}"
        return weights, name


def offloaded(module: nn.Module) -> dict[str, Offloaded]:
    """The parameters, by their names, that hooks inside a module bring in; none of a plain one."""
    places: dict[str, Offloaded] = {}
    for path, part in module.named_modules():
        for hook in _hooks(part):
            if hook.offload:
                for name, _ in part.named_parameters(recurse=hook.place_submodules):
                    places[f"{path}.{name}" if path else name] = Offloaded(hook.weights_map, name)
    return places


def in_full(part: nn.Module, name: str) -> Tensor:
    """A parameter of a part as it is while the part runs."""
    parameter: Tensor = getattr(part, name)
    place = offloaded(part).get(name)
    return parameter if place is None else place.read(parameter)


def device_of(part: nn.Module) -> torch.device:
    """Where a part runs."""
    import torch

    device = next(part.parameters()).device
    if device.type != "meta":
        return device
    for hook in _hooks(part):
        if hook.offload and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    raise ModelError(
        f"The weights of {type(part).__name__} are on the meta device, and no hook brings them in.",
        "Load them, or load the model with device_map.",
    )


def versions(places: Mapping[str, Offloaded]) -> Iterator[tuple[object, ...]]:
    """What changes when tensors or files that weights are read from are changed."""
    files = set()
    for place in places.values():
        held, file = place.held, place.file
        if held is not None:
            yield held.data_ptr(), version(held)
        elif file is not None and file not in files:
            files.add(file)
            about = file.stat()
            yield about.st_ino, about.st_size, about.st_mtime_ns


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


def replaced_forward(part: nn.Module) -> object | None:
    """What stands in the place of the forward of a part's class, hooks that only move tensors aside."""
    if not _only_moves(part):
        return vars(part).get("forward")
    inner: Any = part._old_forward
    return None if getattr(inner, "__func__", None) is type(part).forward else inner


@contextmanager
def unhooked(module: nn.Module) -> Iterator[None]:
    """While this lasts, a module is as if no hook moved its tensors; its weights stay where they are."""
    parts = [part for part in module.modules() if _only_moves(part)]
    before = [dict(vars(part)) for part in parts]
    try:
        for part in parts:
            forward = replaced_forward(part)
            for name in _ADDED:
                vars(part).pop(name, None)
            if forward is not None:
                vars(part)["forward"] = forward
        yield
    finally:
        for part, attributes in zip(parts, before, strict=True):
            vars(part).update(attributes)


def require_in_memory(module: nn.Module) -> None:
    """Refuse a model some of whose weights are elsewhere, where they must be read or changed in place."""
    if offloaded(module):
        raise ModelError(
            f"{type(module).__name__} has weights outside its devices, which cannot be copied here.",
            "Load it without device_map.",
        )


def _only_moves(part: nn.Module) -> bool:
    """Whether the forward of a part is its own, behind hooks that move tensors and do nothing else."""
    forward = vars(part).get("forward")
    wraps = isinstance(forward, partial) and forward.func.__module__ == _HOOKS
    return wraps and all(type(hook).__name__ == "AlignDevicesHook" for hook in _hooks(part))


def _hooks(part: nn.Module) -> list[Any]:
    """The hooks of accelerate on a part, those in a row one by one."""
    hook = vars(part).get("_hf_hook")
    if hook is None or type(hook).__module__ != _HOOKS:
        return []
    return list(getattr(hook, "hooks", (hook,)))
