"""What some architectures do in a way of their own, by the ``model_type`` of their config.

Everything else is found out from the module itself. Another one is added by :func:`register_quirk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

# The width of a sliding window, and the kind of attention of every block where they differ.
Windows: TypeAlias = tuple[int | None, Sequence[str] | None]


def _usual_windows(config: Any) -> Windows:
    if getattr(config, "use_sliding_window", None) is False:
        return None, None
    return getattr(config, "sliding_window", None), getattr(config, "layer_types", None)


@dataclass(frozen=True)
class Quirk:
    """One architecture's own ways.

    ``windows``: where its config says how far a block looks back. ``no_prefix``: why candidates cannot be
    tried on the keys and values of a prefix, where they cannot.
    """

    windows: Callable[[Any], Windows] = _usual_windows
    no_prefix: str = ""


_USUAL = Quirk()
_QUIRKS: dict[str, Quirk] = {}


def register_quirk(model_type: str, quirk: Quirk) -> None:
    """Say what is special about the models of a ``config.model_type``."""
    _QUIRKS[model_type] = quirk


def quirk_of(config: Any) -> Quirk:
    """What is special about a model, by its config."""
    return _QUIRKS.get(getattr(config, "model_type", ""), _USUAL)


register_quirk("gpt_neo", Quirk(windows=lambda config: (config.window_size, config.attention_layers)))
for _name, _what in (("recurrent_gemma", "recurrent blocks keep"), ("minimax", "linear attention keeps")):
    _reason = f"its {_what} a state, not keys and values"
    register_quirk(_name, Quirk(windows=lambda config: (None, None), no_prefix=_reason))
