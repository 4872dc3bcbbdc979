"""The manifest of a state bundle, read without torch, so that a bundle that is none is refused at once."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from preimage.errors import BundleError, first_line
from preimage.storage.files import BEFORE, SCHEMA, parse_json, sha256_document

TENSORS = "states.safetensors"
MANIFEST = "manifest.json"
_MAX_BYTES = 1 << 30  # a manifest is ids and numbers, never more


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle, once its schema is known, and its checksum and its file's size are right."""
    path = folder / MANIFEST
    if not path.is_file():
        hint = "Give a folder made by `preimage capture --out`."
        if (folder / (TENSORS + ".partial")).exists():
            hint = "Its capture was interrupted; rerun the same command to finish it."
        raise BundleError(f"{folder} is not a state bundle: no {MANIFEST} in it.", hint)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        manifest: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        if schema not in (SCHEMA, *BEFORE):
            raise ValueError(f"its schema is {reprlib.repr(schema)}, not {SCHEMA!r}")
        size, sums = manifest["bytes"], manifest["checksums"]
        if set(sums) not in ({TENSORS}, {TENSORS, MANIFEST}):  # of itself it has none in older bundles
            raise ValueError(f"its checksums are {reprlib.repr(sums)}")
        whole = MANIFEST not in sums or sums[MANIFEST] == seal(manifest)["checksums"][MANIFEST]
        if type(size) is not int:
            raise ValueError(f"its bytes are {reprlib.repr(size)}")
        model = manifest["model"]
        if model is not None and not isinstance(model["name"], str):
            raise ValueError(f"its model is named {reprlib.repr(model['name'])}")
        if schema == BEFORE[0] and manifest["model"]:
            manifest["model"]["files_hash"] = manifest["model"].pop("checkpoint", None)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise unusable(folder, error) from error
    if not whole:
        raise BundleError(f"{path} fails its checksum.", "Copy or capture it again.")
    _check_size(folder / TENSORS, size)
    return manifest


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a checksum of everything else in it among its checksums."""
    others = {name: value for name, value in manifest["checksums"].items() if name != MANIFEST}
    return manifest | {"checksums": {**others, MANIFEST: sha256_document(manifest | {"checksums": others})}}


def unusable(folder: Path, error: Exception) -> BundleError:
    """What is said of a manifest that is damaged or contradicts itself."""
    reason = f"it has no {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
    return BundleError(
        f"{folder / MANIFEST} cannot be used: {reason}.", "Make the bundle again with this version."
    )


def _check_size(path: Path, expected: int) -> None:
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        state = f"has {size} bytes, {expected} were written" if size >= 0 else "is missing"
        raise BundleError(f"{path} {state}: truncated or exchanged.", "Copy or capture it again.")
