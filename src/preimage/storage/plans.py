"""What interrupted work was begun with, compared with what it is to be continued with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preimage.errors import RunFolderError, clip, shown

_DIGEST = re.compile(r"[0-9a-f]{40,}")
_SHOWN = 60  # characters of a value


def differences(begun: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The fields of ``now`` that ``begun`` has otherwise, by name and with both values; empty if none.

    Of a field that has fields, those that differ are named. Digests follow from what else was changed, and
    are told only where nothing else was.
    """
    changed = {field: _change(begun.get(field), value) for field, value in now.items()}
    told = _sayable({field: change for field, change in changed.items() if change})
    return "; ".join(f"another {field}: {change}" for field, change in told.items())


def require_same(place: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue what was begun with another plan, naming what differs and both values."""
    changed = differences(begun, now)
    if changed:
        raise RunFolderError(
            f"{place} was begun with {clip(changed, 1000)}.",
            "Rerun the first command, or give another folder.",
        )


class _Change(str):
    """Two values in words; ``digest``: of which nothing but their digests is known."""

    digest = False


def _change(begun: Any, now: Any) -> _Change | None:
    if begun == now:
        return None
    if isinstance(begun, Mapping) and isinstance(now, Mapping):
        inside = {field: _change(begun.get(field), now.get(field)) for field in {**now, **begun}}
        told = _sayable({field: change for field, change in inside.items() if change})
        together = _Change(", ".join(f"{shown(field)} {change}" for field, change in told.items()))
        together.digest = all(change.digest for change in told.values())
        return together
    together = _Change(f"{_short(begun)}, now {_short(now)}")
    together.digest = any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (begun, now))
    return together


def _sayable(changes: dict[str, _Change]) -> dict[str, _Change]:
    words = {field: change for field, change in changes.items() if not change.digest}
    return words or changes


def _short(value: Any) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value[:12]
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
