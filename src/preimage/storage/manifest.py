"""The manifest of a state bundle, read without torch, so that a bundle that is none is refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from preimage.errors import BundleError
from preimage.storage.files import BEFORE, SCHEMA

TENSORS = "states.safetensors"
MANIFEST = "manifest.json"
_MAX_BYTES = 1 << 30  # a manifest is ids and numbers, never more


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle, once its schema is known and its tensor file has the size it names."""
    path = folder / MANIFEST
    if not path.is_file():
        hint = "Give a folder made by `preimage capture --out`."
        if (folder / (TENSORS + ".partial")).exists():
            hint = "Its capture was interrupted; rerun the same command to finish it."
        raise BundleError(f"{folder} is not a state bundle: no {MANIFEST} in it.", hint)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        if schema not in (SCHEMA, *BEFORE):
            raise ValueError(f"its schema is {schema!r}, not {SCHEMA!r}")
        size, _ = manifest["bytes"], manifest["checksums"][TENSORS]
        if schema == BEFORE[0] and manifest["model"]:
            manifest["model"]["files_hash"] = manifest["model"].pop("checkpoint", None)
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise unusable(folder, error) from error
    _check_size(folder / TENSORS, size)
    return manifest


def unusable(folder: Path, error: Exception) -> BundleError:
    """What is said of a manifest that is damaged or contradicts itself."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else error
    return BundleError(
        f"{folder / MANIFEST} cannot be used: {reason}.", "Make the bundle again with this version."
    )


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        state = f"has {size} bytes, {expected} were written" if size >= 0 else "is missing"
        raise BundleError(f"{path} {state}: truncated or exchanged.", "Copy or capture it again.")
