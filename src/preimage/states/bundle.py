"""State bundles: a folder with ``states.safetensors`` and ``manifest.json``.

The manifest is written last and renamed into place, so a folder with a manifest is whole.
"""

from __future__ import annotations

import reprlib
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

from preimage.errors import BundleError, PreimageError, StatesError, UnwritableError
from preimage.layers import CONVENTION, Layer
from preimage.observations import Observation
from preimage.states.layout import Group, KeptPositions, Layout
from preimage.states.states import DTYPES, States
from preimage.storage import MANIFEST, SCHEMA, TENSORS, read_manifest, seal, sha256_file, unusable, write_json
from preimage.storage.locking import hold
from preimage.storage.places import on_a_disk
from preimage.storage.tensor_file import TensorFileReader, TensorFileWriter

UNFINISHED = "capture"  # the run of a capture that is under way, beside the partial file
_RECORD = "record.jsonl"  # who made the bundle
_OURS = {TENSORS, UNFINISHED, _RECORD}  # and whatever is partial


def save_bundle(states: States, folder: Path, *, withhold_ids: bool = False) -> Path:
    """Write states as a bundle. The folder must be new, empty, or the place of nothing else."""
    prepare_folder(folder)
    partial = folder / (TENSORS + ".partial")
    partial.unlink(missing_ok=True)
    try:
        with closing(TensorFileWriter(partial, states.layout.names(), states.dtype)) as writer:
            for name, shape in states.layout.names().items():
                for row in range(shape[0]):
                    writer.write(name, row, states.store.rows(name, row, row + 1))
        finish_bundle(folder, states, withhold_ids=withhold_ids)
    except (OSError, UnwritableError) as error:
        partial.unlink(missing_ok=True)
        raise unwritable(folder, error) from error
    return folder


def prepare_folder(folder: Path) -> None:
    """Make the folder; refuse one that already holds a bundle or something else."""
    if (folder / MANIFEST).exists():
        raise BundleError(f"{folder} already holds a bundle.", "Give another folder.")
    if folder.exists() and not folder.is_dir():
        raise BundleError(f"{folder} is a file.", "Give the name of a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise unwritable(folder, error) from error
    others = [name for name in names if name not in _OURS and not name.endswith(".partial")]
    if others:
        raise BundleError(f"{folder} holds other files, {others[0]} first.", "Give a new or empty folder.")
    try:
        if {TENSORS, UNFINISHED} <= set(names):
            _reopen(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


class _Visit:
    """Has a folder to itself for as long as it lives."""


def _reopen(folder: Path) -> None:
    """Give the states of a capture that was killed before the manifest was there their first name again.

    Its pieces are all listed as finished: it needs its manifest, and no pass.
    """
    visit = _Visit()
    hold(folder / UNFINISHED, visit)
    if not (folder / MANIFEST).exists():  # else whoever had the folder was about to finish, and did
        (folder / TENSORS).replace(folder / (TENSORS + ".partial"))


def finish_bundle(folder: Path, states: States, *, withhold_ids: bool) -> None:
    """Turn a completely filled partial tensor file into a bundle."""
    partial, run = folder / (TENSORS + ".partial"), folder / UNFINISHED
    manifest = _manifest(states, withhold_ids) | {
        "checksums": {TENSORS: sha256_file(partial)},
        "bytes": partial.stat().st_size,
    }
    partial.replace(folder / TENSORS)
    if (run / _RECORD).exists():
        (run / _RECORD).replace(folder / _RECORD)
    write_json(folder / MANIFEST, seal(manifest))
    for begun in folder.glob(f"{MANIFEST}.*.partial"):  # by processes that were killed
        begun.unlink(missing_ok=True)
    shutil.rmtree(run, ignore_errors=True)


def _manifest(states: States, withhold_ids: bool) -> dict[str, Any]:
    """Everything about states but the numbers themselves."""
    ids = states.token_ids
    return {
        "schema": SCHEMA,
        "kind": "states",
        "model": states.model,
        "dtype": str(states.dtype).removeprefix("torch."),
        "layer_convention": CONVENTION,
        "layers": list(states.layers),
        "observation": states.observation.where,
        "positions": states.positions,
        "d_model": states.d_model,
        "groups": [group._asdict() for group in states.layout.groups],
        "token_ids": None if withhold_ids or ids is None else [list(row) for row in ids],
        "noise_floor": {str(layer): value for layer, value in states.noise_floor.items()},
        "prompts": None if withhold_ids else states.prompts,  # a source and a seed are as good as the ids
    }


def open_states(path: str | Path, *, verify: bool = True) -> States:
    """Open the folder of a bundle that :meth:`States.save` or a capture wrote.

    ``verify`` compares the checksum of the states' file, which reads it once. The states stay on disk: only
    what is asked for is read into memory.

    >>> import tempfile, torch
    >>> from preimage import States, open_states
    >>> folder = tempfile.mkdtemp() + "/bundle"
    >>> _ = States.from_tensor(torch.ones(1, 4, 16), layer=2).save(folder)
    >>> open_states(folder).at(0, 2).shape
    torch.Size([4, 16])
    """
    if not isinstance(path, str | Path):
        raise BundleError(f"A {type(path).__name__} is no path of a bundle.", "Give the folder of one.")
    folder = on_a_disk(path, "a bundle")
    return open_bundle(folder, read_manifest(folder), verify=verify)


def open_bundle(folder: Path, manifest: dict[str, Any], *, verify: bool = True) -> States:
    """The same, where the manifest has been read already."""
    try:
        layout = _layout(manifest)
        floor = {_layer(layer): _floor(value) for layer, value in manifest["noise_floor"].items()}
        dtype = DTYPES[manifest["dtype"]]
        token_ids, model = _token_ids(manifest["token_ids"], layout), _model(manifest["model"])
        observation = _observation(manifest.get("observation"), layout)  # preimage/2 had no such field
        prompts = manifest.get("prompts")
        if not isinstance(prompts, dict | None):
            raise ValueError("its prompts are not a source and its options")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise unusable(folder, error) from error
    tensors = folder / TENSORS
    if verify and sha256_file(tensors) != manifest["checksums"][TENSORS]:
        raise BundleError(f"{tensors} fails its checksum.", "Copy or capture it again.")
    reader = TensorFileReader(tensors)
    if reader.shapes != layout.names() or set(reader.dtypes.values()) != {dtype}:
        raise BundleError(f"{tensors} and its manifest disagree.", "Make the bundle again.")
    return States(
        layout, reader, token_ids=token_ids, model=model, noise_floor=floor, dtype=dtype, prompts=prompts,
        observation=observation,
    )  # fmt: skip


def _layout(manifest: dict[str, Any]) -> Layout:
    groups = tuple(Group(_whole(g["length"]), tuple(map(_whole, g["prompts"]))) for g in manifest["groups"])
    members = sorted(i for group in groups for i in group.prompts)
    if members != list(range(len(members))) or not all(group.prompts for group in groups):
        raise ValueError("its groups do not number the prompts 0..n-1")
    if manifest["positions"] == "all" and not all(group.length for group in groups):
        raise ValueError("it has prompts without a position")
    if manifest["positions"] not in get_args(KeptPositions):
        raise ValueError(
            f"positions {reprlib.repr(manifest['positions'])} is none of {', '.join(get_args(KeptPositions))}"
        )
    layers = tuple(_layer(layer) for layer in manifest["layers"])
    if len(set(layers)) < len(layers):
        raise ValueError("it has a layer twice")
    return Layout(groups, layers, manifest["positions"], _whole(manifest["d_model"]))


def _whole(value: Any) -> int:
    """A number 0, 1, 2 …, and nothing that could be read as one."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{reprlib.repr(value)} is none of its counts")
    return value


def _layer(value: Any) -> Layer:
    """A layer; the keys of a json object are text."""
    if isinstance(value, str):
        return "final" if value == "final" else _whole(int(value))
    return _whole(value)


def _observation(where: Any, layout: Layout) -> Observation:
    if where is None:
        return Observation()
    try:
        if not isinstance(where, dict) or "place" not in where:
            raise ValueError("its observation names no place")
        observation = Observation.from_dict(where)
        if observation.place == "final":
            raise ValueError("its observation is final, which is a layer")
        for layer in layout.layers:
            observation.tap(layer, max((one for one in layout.layers if one != "final"), default=0))
    except PreimageError as error:
        raise ValueError(error.message) from error
    return observation


def _floor(value: Any) -> float:
    if not 0 <= float(value) < 1:  # a relative difference; NaN is neither
        raise ValueError(f"a noise floor of {reprlib.repr(value)} is none")
    return float(value)


def _token_ids(rows: Any, layout: Layout) -> list[list[int]] | None:
    if rows is None:
        return None
    if tuple(len(row) for row in rows) != layout.lengths:
        raise ValueError("its token ids are not as long as its prompts")
    if not all(type(token) is int for row in rows for token in row):
        raise ValueError("its token ids are not whole numbers")
    return [list(row) for row in rows]


def _model(identity: Any) -> dict[str, Any] | None:
    if identity is None:
        return None
    if not all(isinstance(identity[field], str) for field in ("name", "weight_hash", "dtype")):
        raise ValueError("its model has no name, weight_hash and dtype")
    return dict(identity)


def unwritable(folder: Path, error: OSError | UnwritableError) -> StatesError:
    """What is said where the disk is full, read-only or gone."""
    cause = error.__cause__ if isinstance(error, UnwritableError) else error
    reason = getattr(cause, "strerror", None) or cause
    return BundleError(
        f"{folder} cannot be written: {reason}.",
        "Make room and rerun the same command, which continues, or give another folder.",
    )
