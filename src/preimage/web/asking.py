"""What a page asks for, held against what may be asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preimage.errors import OptionError, PromptError, clip
from preimage.observations import PLACES
from preimage.web.guard import RequestError
from preimage.web.options import Limits

KINDS = ("prompt", "noise", "margins", "layers", "file")
SIPIT = ("none", "cached", "published")
_MOST_SIPIT = 120.0  # seconds
_MOST_NOISE = 1000.0  # percent
_SEEN = ("all", "last", "mean")


@dataclass(frozen=True)
class Ask:
    """One job, as it was asked for. ``layer`` and ``key`` are empty where nothing was said."""

    kind: str
    prompt: str = ""
    layer: str = ""
    sipit: str = "none"
    sipit_seconds: float = 15.0
    percent: float = 0.0
    upload: str = ""
    key: str = ""
    observe: str = "residual"
    positions: str = "all"
    any_model: bool = False


def parse_ask(given: Any, limits: Limits) -> Ask:
    """What a document asks for; what it may not is refused by name."""
    if not isinstance(given, Mapping):
        raise RequestError("The request is no json object.", "Send one.")
    known = {name: type(getattr(Ask(""), name)) for name in Ask.__dataclass_fields__}
    for name, value in given.items():
        if name not in known:
            raise RequestError(
                f"{clip(str(name), 60)!r} is nothing that can be asked.", f"Use {', '.join(known)}."
            )
        wanted = (int, float) if known[name] is float else known[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and known[name] is not bool):
            raise RequestError(f"{name} is a {type(value).__name__}.", f"Give a {known[name].__name__}.")
    if given.get("kind") not in KINDS:
        raise RequestError("The kind of job is not known.", f"Use {', '.join(KINDS)}.")
    ask = Ask(**given)
    _among("sipit", ask.sipit, SIPIT)
    _among("observe", ask.observe, PLACES)
    _among("positions", ask.positions, _SEEN)
    _within("sipit_seconds", ask.sipit_seconds, _MOST_SIPIT)
    _within("percent", ask.percent, _MOST_NOISE)
    for name in ("layer", "key", "upload"):
        if len(getattr(ask, name)) > 300:
            raise OptionError(f"{name} has {len(getattr(ask, name)):,} letters.", "Give a short one.")
    if ask.kind == "file":
        if not ask.upload:
            raise RequestError("No file was given.", "Drop one, or choose it.")
    elif len(ask.prompt) > limits.letters:
        raise PromptError(
            f"The prompt has {len(ask.prompt):,} letters.", f"The page takes {limits.letters:,}; shorten it."
        )
    elif not ask.prompt:
        raise PromptError("There is no prompt.", "Type one.")
    return ask


def _among(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} {clip(value, 60)!r} is not known.", f"Use {', '.join(allowed)}.")


def _within(name: str, value: float, most: float) -> None:
    if not math.isfinite(value) or not 0 <= value <= most:
        raise OptionError(f"{name} is {value}.", f"Give a number from 0 to {most:g}.")
