"""``preimage.capture``: prompts in, hidden states out, exactly as plain transformers computes them."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preimage.errors import OptionError, PromptError, RunFolderError, UnwritableError
from preimage.layers import LayerSpec, parse_layers
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptSet, encode
from preimage.states.bundle import PLAN, finish_bundle, manifest_of, open_states, prepare_folder, unwritable
from preimage.states.layout import KeptPositions, Layout, group_by_length, tensor_name
from preimage.states.noise import noise_floor
from preimage.states.states import MemoryStore, States
from preimage.states.tensor_file import TensorFileReader, TensorFileWriter, file_bytes
from preimage.storage import MANIFEST, TENSORS, read_json, require_same, write_json

_MEMORY_BYTES = 2 * 2**30  # more than this goes to disk
_CUDA_BATCH_TOKENS = 16384
_SYNC_SECONDS = 2.0


def capture(
    model: LanguageModel,
    prompts: str | Sequence[str | Sequence[int]] | Sequence[int] | PromptSet,
    layers: LayerSpec = "all",
    *,
    positions: str = "all",  # or "last"
    batch_tokens: int | None = None,
    bos: bool | None = None,
    out: str | Path | None = None,
    withhold_ids: bool = False,
    progress: Progress = silent,
) -> States:
    """States of every prompt at ``layers``, all layers in one pass a batch.

    Prompts of equal length share a batch of at most ``batch_tokens`` tokens; nothing is padded. By default
    a CPU runs prompts one by one, because the bits of a state depend on the batch it was computed in and
    one by one they are those of ``model(ids)``; CUDA takes 16,384 tokens a batch.

    With ``out`` the states stream into a bundle there, and calling again after an interruption continues
    it. Without, they stay in memory, or in a temporary folder where they would exceed 2 GiB.
    """
    if positions not in ("all", "last"):
        raise OptionError(f"positions {positions!r} is not known.", "Use all or last.")
    kept: KeptPositions = "last" if positions == "last" else "all"
    if batch_tokens is not None and batch_tokens < 1:
        raise OptionError(f"batch_tokens is {batch_tokens}.", "Give at least 1.")
    wanted = parse_layers(layers, model.n_layers)
    ids = encode_all(model, prompts, bos)
    layout = Layout(group_by_length([len(row) for row in ids]), wanted, kept, model.d_model)
    if batch_tokens is None:
        batch_tokens = 1 if model.device.type == "cpu" else _CUDA_BATCH_TOKENS
    states = States(
        layout,
        MemoryStore({}),
        token_ids=ids,
        model=model.identity.to_dict(),
        noise_floor=noise_floor(model, wanted),
        dtype=model.dtype,
    )
    if out is not None:
        return _capture_to_disk(model, states, Path(out), batch_tokens, withhold_ids, progress)
    if layout.elements() * model.dtype.itemsize > _MEMORY_BYTES:
        temporary = tempfile.TemporaryDirectory(prefix="preimage-")
        weakref.finalize(states, temporary.cleanup)  # it lives as long as the states do
        folder = Path(temporary.name) / "bundle"
        return _capture_to_disk(model, states, folder, batch_tokens, withhold_ids, progress)
    tensors = {name: torch.empty(s, dtype=model.dtype) for name, s in layout.names().items()}
    for name, row, part in _batches(model, states, batch_tokens, 0, progress):
        tensors[name][row : row + len(part)] = part
    states.store = MemoryStore(tensors)
    return states


def encode_all(
    model: LanguageModel,
    prompts: str | Sequence[str | Sequence[int]] | Sequence[int] | PromptSet,
    bos: bool | None = None,
) -> list[tuple[int, ...]]:
    """Token ids of every prompt, each checked against vocabulary and context."""
    rows: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not rows:
        raise PromptError("No prompt was given.", "Give at least one text or list of token ids.")
    if isinstance(rows[0], int):
        rows = [rows]  # one bare list of ids is one prompt
    limits = {"vocab_size": model.vocab_size, "max_length": model.max_length}
    return [
        encode(row, model.tokenizer, bos=bos, name=f"Prompt {index}", **limits)  # type: ignore[arg-type]
        for index, row in enumerate(rows)
    ]


def _batches(
    model: LanguageModel, states: States, batch_tokens: int, done: int, progress: Progress
) -> Iterator[tuple[str, int, Tensor]]:
    """(tensor name, first row, rows) for everything after the first ``done`` prompts in layout order."""
    layout, ids = states.layout, states.token_ids
    assert ids is not None
    finished = 0
    for index, group in enumerate(layout.groups):
        size = max(1, batch_tokens // group.length)
        row = min(max(done - finished, 0), len(group.prompts))
        finished += row
        while row < len(group.prompts):
            members = group.prompts[row : row + size]
            found = model.states(torch.tensor([ids[i] for i in members]), layout.layers)
            for layer, tensor in found.items():
                kept = tensor if layout.positions == "all" else tensor[:, -1:]
                yield tensor_name(layer, index), row, kept.cpu()
            row += len(members)
            finished += len(members)
            progress(finished, layout.count, "prompts captured")


def _capture_to_disk(
    model: LanguageModel,
    states: States,
    folder: Path,
    batch_tokens: int,
    withhold_ids: bool,
    progress: Progress,
) -> States:
    """Stream into a bundle; ``capture.json`` counts the prompts whose states are safely on disk."""
    finished = _finished(folder, states)
    if finished is not None:
        return finished
    try:
        _fill(model, states, folder, batch_tokens, progress)
        finish_bundle(folder, manifest_of(states, withhold_ids=withhold_ids))
        (folder / PLAN).unlink()
    except (OSError, UnwritableError) as error:
        raise unwritable(folder, error) from error
    states.store = TensorFileReader(folder / TENSORS)
    return states


def _finished(folder: Path, states: States) -> States | None:
    """The bundle in the folder, if it is the very one asked for; its ids must be in it to know that."""
    if not (folder / MANIFEST).exists():
        return None
    there = open_states(folder)
    same = there.model is not None and there.token_ids is not None and _plan(there) == _plan(states)
    return there if same else None


def _fill(model: LanguageModel, states: States, folder: Path, batch_tokens: int, progress: Progress) -> None:
    """Write every state into the partial file, after those an interrupted capture left there."""
    plan = _plan(states)
    done = _resume(folder, plan, file_bytes(states.layout.names(), states.dtype))
    writer = TensorFileWriter(folder / (TENSORS + ".partial"), states.layout.names(), states.dtype)
    finished, synced = done, time.monotonic()

    def count(now: int, total: int, note: str) -> None:
        nonlocal finished
        finished = now
        progress(now, total, note)

    per_batch = len(states.layers)
    try:
        parts = _batches(model, states, batch_tokens, done, count)
        for number, (name, row, part) in enumerate(parts, start=1):
            writer.write(name, row, part)
            if number % per_batch == 0 and time.monotonic() - synced > _SYNC_SECONDS:
                writer.sync()
                _write_plan(folder, plan, finished)
                synced = time.monotonic()
    finally:
        writer.close()
        _write_plan(folder, plan, finished)


def _plan(states: States) -> dict[str, Any]:
    """What must be the same for an interrupted capture to be continued."""
    assert states.model is not None
    return {
        "model": states.model["weight_hash"],
        "dtype": states.model["dtype"],
        "prompts": hashlib.sha256(json.dumps(states.token_ids).encode()).hexdigest(),
        "layers": list(states.layers),
        "positions": states.positions,
    }


def _resume(folder: Path, plan: dict[str, Any], size: int) -> int:
    """Prompts already captured in the folder; refuses a folder that was begun for other work."""
    path, partial = folder / PLAN, folder / (TENSORS + ".partial")
    if not path.exists() or (folder / MANIFEST).exists():
        prepare_folder(folder)
        return _begin(partial, plan)
    saved = read_json(path)
    try:
        begun, done = {field: saved["plan"][field] for field in plan}, int(saved["done"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}.", "Give another folder.") from error
    require_same(folder, begun, plan)
    whole = partial.is_file() and partial.stat().st_size == size
    return done if whole else _begin(partial, plan)


def _begin(partial: Path, plan: dict[str, Any]) -> int:
    """Forget what was captured, in this order: a plan must never count rows that are not there."""
    _write_plan(partial.parent, plan, 0)
    partial.unlink(missing_ok=True)
    return 0


def _write_plan(folder: Path, plan: dict[str, Any], done: int) -> None:
    write_json(folder / PLAN, {"plan": plan, "done": done})
