"""State bundles: a folder with ``states.safetensors`` and ``manifest.json``.

The manifest is written last and renamed into place, so a folder with a manifest is whole.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from preimage.errors import BundleError, StatesError
from preimage.models import CONVENTION, Layer
from preimage.schema import SCHEMA
from preimage.states.layout import Group, Layout
from preimage.states.states import States
from preimage.states.tensor_file import TensorFileReader, TensorFileWriter, sha256_file

TENSORS = "states.safetensors"
MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 30  # bytes; a manifest is ids and numbers, never more


def save_bundle(states: States, folder: Path, *, withhold_ids: bool = False) -> Path:
    """Write states as a bundle. The folder must be new, empty, or the place of nothing else."""
    prepare_folder(folder)
    partial = folder / (TENSORS + ".partial")
    partial.unlink(missing_ok=True)
    try:
        writer = TensorFileWriter(partial, states.layout.names(), states.dtype)
        for name, shape in states.layout.names().items():
            for row in range(shape[0]):
                writer.write(name, row, states.store.rows(name, row, row + 1))
        writer.close()
        finish_bundle(folder, manifest_of(states, withhold_ids=withhold_ids))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def prepare_folder(folder: Path) -> None:
    """Make the folder; refuse one that already holds a bundle or something else."""
    if (folder / MANIFEST).exists():
        raise BundleError(f"{folder} already holds a bundle.", "Give another folder.")
    if folder.exists() and not folder.is_dir():
        raise BundleError(f"{folder} is a file.", "Give the name of a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def finish_bundle(folder: Path, manifest: dict[str, Any]) -> None:
    """Turn a completely filled partial tensor file into a bundle."""
    partial = folder / (TENSORS + ".partial")
    manifest["checksums"] = {TENSORS: sha256_file(partial)}
    manifest["bytes"] = partial.stat().st_size
    partial.replace(folder / TENSORS)
    temporary = folder / (MANIFEST + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def manifest_of(states: States, *, withhold_ids: bool) -> dict[str, Any]:
    """Everything about states but the numbers themselves."""
    ids = states.token_ids
    return {
        "schema": SCHEMA,
        "kind": "states",
        "model": states.model,
        "dtype": str(states.dtype).removeprefix("torch."),
        "layer_convention": CONVENTION,
        "layers": list(states.layers),
        "positions": states.positions,
        "d_model": states.d_model,
        "groups": [group.to_dict() for group in states.layout.groups],
        "token_ids": None if withhold_ids or ids is None else [list(row) for row in ids],
        "noise_floor": {str(layer): value for layer, value in states.noise_floor.items()},
    }


def open_states(path: str | Path, *, verify: bool = True) -> States:
    """Open a bundle without reading it into memory; its checksum is verified unless told not to."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        hint = "Give a folder made by `preimage capture --out`."
        if (folder / (TENSORS + ".partial")).exists():
            hint = "Its capture was interrupted; rerun the same command to finish it."
        raise BundleError(f"{folder} is not a state bundle: no {MANIFEST} in it.", hint)
    try:
        if (folder / MANIFEST).stat().st_size > _MAX_MANIFEST:
            raise ValueError("it is too large")
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {manifest.get('schema')!r}, not {SCHEMA!r}")
        layout = _layout(manifest)
        floor = {_layer(layer): float(value) for layer, value in manifest["noise_floor"].items()}
        dtype = getattr(torch, manifest["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise BundleError(
            f"{folder / MANIFEST} cannot be used: {error}.",
            "Make the bundle again with this version.",
        ) from error
    _check_file(folder / TENSORS, manifest, verify=verify)
    reader = TensorFileReader(folder / TENSORS)
    if reader.shapes != layout.names():
        raise BundleError(f"{folder / TENSORS} and its manifest disagree.", "Make the bundle again.")
    return States(
        layout,
        reader,
        token_ids=manifest["token_ids"],
        model=manifest["model"],
        noise_floor=floor,
        dtype=dtype,
    )


def _check_file(path: Path, manifest: dict[str, Any], *, verify: bool) -> None:
    size = path.stat().st_size if path.is_file() else -1
    if size != manifest["bytes"]:
        state = f"has {size} bytes, {manifest['bytes']} were written" if size >= 0 else "is missing"
        raise BundleError(f"{path} {state}: truncated or exchanged.", "Copy or capture it again.")
    if verify and sha256_file(path) != manifest["checksums"][TENSORS]:
        raise BundleError(f"{path} fails its checksum.", "Copy or capture it again.")


def _layout(manifest: dict[str, Any]) -> Layout:
    groups = tuple(Group(int(g["length"]), tuple(g["prompts"])) for g in manifest["groups"])
    members = sorted(i for group in groups for i in group.prompts)
    if members != list(range(len(members))):
        raise ValueError("its groups do not number the prompts 0..n-1")
    if manifest["positions"] not in ("all", "last"):
        raise ValueError(f"positions {manifest['positions']!r} is neither all nor last")
    layers = tuple(_layer(layer) for layer in manifest["layers"])
    return Layout(groups, layers, manifest["positions"], int(manifest["d_model"]))


def _layer(value: int | str) -> Layer:
    return "final" if value == "final" else int(value)


def _unwritable(folder: Path, error: OSError) -> StatesError:
    return BundleError(f"{folder} cannot be written: {error.strerror}.", "Give another folder.")
