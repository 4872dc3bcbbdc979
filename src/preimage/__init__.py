"""Which prompt made this hidden state, and could any other have made it?

Public names are loaded when first used: ``import preimage`` itself does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preimage.errors import PreimageError
    from preimage.inversion import InvertOptions, invert
    from preimage.models import LanguageModel, load
    from preimage.prompts import PromptOptions, PromptSet
    from preimage.results import Inversion
    from preimage.states import States, capture, noise_floor, open_states

__version__ = "0.1.0"

_ROOMS = {
    "Inversion": "results",
    "InvertOptions": "inversion",
    "LanguageModel": "models",
    "PreimageError": "errors",
    "PromptOptions": "prompts",
    "PromptSet": "prompts",
    "States": "states",
    "capture": "states",
    "invert": "inversion",
    "load": "models",
    "noise_floor": "states",
    "open_states": "states",
}

__all__ = [
    "Inversion",
    "InvertOptions",
    "LanguageModel",
    "PreimageError",
    "PromptOptions",
    "PromptSet",
    "States",
    "__version__",
    "capture",
    "invert",
    "load",
    "noise_floor",
    "open_states",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'preimage' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"preimage.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
