"""``preimage.capture``: prompts in, hidden states out, exactly as plain transformers computes them."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from preimage.devices import BATCH_TOKENS, by_device
from preimage.errors import BundleError, OptionError, PromptError, UnwritableError
from preimage.layers import Layer, LayerSpec
from preimage.models import LanguageModel, require_model, told_model
from preimage.observations import Observation, Tap
from preimage.progress import Listener, Progress, reporting, silent
from preimage.prompts import PromptSet, encode, listed
from preimage.states.batches import Piece, cut, missing, parts_of
from preimage.states.bundle import UNFINISHED, finish_bundle, open_states, prepare_folder, unwritable
from preimage.states.layout import KeptPositions, Layout, group_by_length, tensor_name
from preimage.states.noise import noise_floor
from preimage.states.pieces import CaptureJob, Computing, PieceStore, copied, digest_of, pack_ids
from preimage.states.states import MemoryStore, States, Store
from preimage.storage import MANIFEST, TENSORS, Errand, Place, Run, current_workers, is_remote
from preimage.storage.places import on_a_disk
from preimage.storage.shelf import FolderShelf
from preimage.storage.tensor_file import TensorFileReader, TensorFileWriter, file_bytes

_MEMORY_BYTES = 2 * 2**30  # more than this goes to disk
_CUDA_BATCH_TOKENS = 16384
_PIECES = "pieces"  # the folder of files of some prompts each, inside that of a run
SPREAD = "spread"  # the folder of a run that captures for work of our own, so
_COPIED = 256  # rows copied at once


class CaptureDetails(TypedDict, total=False):
    """What a capture seldom needs to be told."""

    batch_tokens: int | None
    withhold_ids: bool


@dataclass(frozen=True)
class _Details:
    batch_tokens: int | None = None
    withhold_ids: bool = False

    def __post_init__(self) -> None:
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise OptionError(f"batch_tokens is {self.batch_tokens}.", "Give at least 1.")


def capture(
    model: LanguageModel,
    prompts: str | Sequence[str | Sequence[int]] | Sequence[int] | PromptSet,
    layers: LayerSpec = "all",
    *,
    observe: str | Observation = "residual",
    positions: str = "all",  # or "last"
    out: str | Path | None = None,
    progress: Listener = silent,
    **details: Unpack[CaptureDetails],
) -> States:
    """States of every prompt at ``layers``, all layers in one pass per batch.

    ``prompts``: texts, lists of token ids, or a set from :func:`preimage.gather`, which can be told about
    BOS. ``observe``: what is kept at a layer: the residual stream, or keys, values, ... of that block
    (:class:`preimage.Observation`, of which the place and rotary alone matter here). ``positions``: every
    position of a prompt, or its last alone. Prompts of equal length share a batch of at most
    ``batch_tokens`` tokens; nothing is padded. By default a CPU runs prompts one by one, because the bits of
    a state depend on the batch it was computed in and one by one they are those of ``model(ids)``; CUDA takes
    16,384 tokens per batch.

    With ``out`` the states stream into a bundle there (without token ids where they are withheld), and
    calling again after an interruption continues it. Without, they stay in memory, or in a temporary folder
    where they would exceed 2 GiB. Cost: one forward pass up to the deepest layer.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", "tiny", vocabulary=300, max_length=32)
    >>> states = preimage.capture(model, [[5, 6, 7], [8, 9]], layers=[1, "final"])
    >>> states.at(0, 1).shape, states.last("final").shape
    (torch.Size([3, 64]), torch.Size([2, 64]))
    """
    require_model(model)
    if positions not in ("all", "last"):
        raise OptionError(f"positions {positions!r} is not known.", "Use all or last.")
    kept: KeptPositions = "last" if positions == "last" else "all"
    more = _Details(**details)
    seen = Observation.of(observe)
    wanted = seen.layers(layers, model.n_layers)
    seen = Observation() if wanted == ("final",) else Observation(seen.place, seen.rotary)
    ids = encode_all(model, prompts)
    width = _width(model, {layer: seen.tap(layer, model.n_layers) for layer in wanted})
    layout = Layout(group_by_length([len(row) for row in ids]), wanted, kept, width)
    batch_tokens = more.batch_tokens or (1 if model.device.type == "cpu" else _CUDA_BATCH_TOKENS)
    provenance = prompts.provenance if isinstance(prompts, PromptSet) else None
    with reporting(progress) as report:
        job = _Capture(Computing(model, ids, layout, seen), seen, batch_tokens, report, provenance)
        return _captured(job, None if out is None else on_a_disk(out, "a bundle"), more.withhold_ids)


def _captured(job: _Capture, out: Path | None, withhold_ids: bool) -> States:
    """The states in a bundle, in memory, or where they are too large for that in a temporary folder."""
    if out is not None:
        return job.to_bundle(out, withhold_ids)
    if sum(map(math.prod, job.layout.names().values())) * job.model.dtype.itemsize <= _MEMORY_BYTES:
        return job.to_memory()
    temporary = tempfile.TemporaryDirectory(prefix="preimage-")
    try:
        states = job.to_bundle(Path(temporary.name) / "bundle", withhold_ids=False)
    except BaseException:
        temporary.cleanup()
        raise
    weakref.finalize(states, temporary.cleanup)  # it lives as long as the states do
    return states


def capture_for_run(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | PromptSet,
    layers: Sequence[Layer],
    folder: Place | None,
    progress: Progress = silent,
) -> States:
    """Last states of prompts for work of our own, in ``folder`` as long as that lasts.

    In files of some prompts each where there are workers, or the folder is at an address; else in a bundle
    (without a folder: in memory). The batches are those of the device.
    """
    batch = by_device(BATCH_TOKENS, model.device)
    spread = folder is not None and (is_remote(folder) or current_workers() or (folder / SPREAD).exists())
    if folder is None or not spread:
        return capture(
            model, prompts, layers, positions="last", batch_tokens=batch, out=folder, progress=progress
        )
    ids, provenance = (
        encode_all(model, prompts),
        prompts.provenance if isinstance(prompts, PromptSet) else None,
    )
    seen = Observation()
    layout = Layout(group_by_length([len(row) for row in ids]), tuple(layers), "last", model.d_model)
    job = _Capture(Computing(model, ids, layout, seen), seen, batch, progress, provenance)
    return job.in_pieces(Run(job.plan, folder / SPREAD), None if is_remote(folder) else job.finished(folder))


def encode_all(
    model: LanguageModel,
    prompts: str | Sequence[str | Sequence[int]] | Sequence[int] | PromptSet,
    bos: bool | None = None,
) -> list[tuple[int, ...]]:
    """Token ids of every prompt, each checked against vocabulary and context."""
    rows = listed(prompts)
    if not rows:
        raise PromptError("No prompt was given.", "Give at least one text or list of token ids.")
    tokenizer, size, longest = model.tokenizer, model.vocab_size, model.max_length
    return [
        encode(row, tokenizer, vocab_size=size, max_length=longest, bos=bos, name=f"Prompt {index}")
        for index, row in enumerate(rows)
    ]


def _width(model: LanguageModel, taps: dict[Layer, Tap]) -> int:
    """The width of what is seen at every layer, which must be one."""
    widths = {layer: model.width(tap) for layer, tap in taps.items()}
    if len(set(widths.values())) > 1:
        raise OptionError(
            f"These layers differ in width: {', '.join(f'{k}: {v}' for k, v in list(widths.items())[:8])}.",
            "Capture those of one width.",
        )
    return next(iter(widths.values()))


class _Capture:
    """One capture: which states go where, in the order of the layout."""

    def __init__(
        self,
        computing: Computing,
        observation: Observation,
        batch_tokens: int,
        progress: Progress,
        provenance: dict[str, Any] | None,
    ) -> None:
        self.computing, self.observation = computing, observation
        self.model, self.ids, self.layout = computing.model, computing.ids, computing.layout
        self.batch_tokens, self.progress, self.provenance = batch_tokens, progress, provenance
        # What must be the same for an interrupted capture to be continued; the batch need not be.
        self.plan = _plan(self.model.identity.to_dict(), self.ids, self.layout, observation)

    def to_memory(self) -> States:
        """Capture into tensors."""
        shapes = self.layout.names()
        store = MemoryStore({name: torch.empty(s, dtype=self.model.dtype) for name, s in shapes.items()})
        run = Run(self.plan, None)
        if current_workers() is None:
            self._fill(run, store)
        else:
            self._copy(self.in_pieces(run), store)
        return self._states(store)

    def to_bundle(self, folder: Path, withhold_ids: bool) -> States:
        """Capture into a bundle, or finish one that was begun there."""
        there = self.finished(folder)
        if there is not None:
            return there
        prepare_folder(folder)
        shapes, dtype = self.layout.names(), self.model.dtype
        partial = folder / (TENSORS + ".partial")
        try:
            run = Run(self.plan, folder / UNFINISHED, name_command=not withhold_ids)
            begun_so = (folder / UNFINISHED / _PIECES).exists()
            pieces = self.in_pieces(run) if begun_so or current_workers() is not None else None
            if not partial.is_file() or partial.stat().st_size != file_bytes(shapes, dtype):
                if pieces is None:
                    run.forget()  # first: no finished piece may be counted whose rows are not there
                partial.unlink(missing_ok=True)
            with closing(TensorFileWriter(partial, shapes, dtype)) as writer:
                self._fill(run, writer) if pieces is None else self._copy(pieces, writer)
            states = self._states(TensorFileReader(partial))  # which stays open when the file is renamed
            finish_bundle(folder, states, withhold_ids=withhold_ids)
        except (OSError, UnwritableError) as error:
            raise unwritable(folder, error) from error
        return states

    def in_pieces(self, run: Run, there_already: States | None = None) -> States:
        """Capture into files of some prompts each, in the folder of a run, and read states from there.

        States that are there already are only copied.
        """
        assert run.path is not None
        model, layout, tokens = self.model, self.layout, self.batch_tokens
        if run.items and not run.has(_PIECES):
            run.forget()  # what was begun in one file is not in any other
        there = [Piece.of(key) for key in run.items]
        left = {
            piece.key: batches
            for gap in missing(layout.count, there)
            for piece, batches in cut(layout, tokens, gap).items()
        }
        shelf = FolderShelf(run.path)

        def capture_piece(keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
            for key in keys:
                piece = Piece.of(key)
                if there_already is not None:
                    content = copied(layout, piece, there_already)
                else:
                    content = self.computing.file(piece, left[key])
                shelf.put(f"{_PIECES}/{key}.safetensors", *content)
                yield {}

        errand = None
        if current_workers() is not None and there_already is None:
            spec = CaptureJob.spec(told_model(model), layout, self.observation, _PIECES, tokens)
            errand = Errand(CaptureJob.NAME, spec, pack_ids(self.ids), here_too=True)
        keys = [*run.items, *left]
        run.each(keys, dict, capture_piece, self.progress, "pieces captured", errand=errand)
        pieces = [Piece.of(key) for key in keys]
        return self._states(PieceStore(shelf, _PIECES, layout, model.dtype, pieces))

    def _copy(self, states: States, store: MemoryStore | TensorFileWriter) -> None:
        """Put states that are in pieces where they belong."""
        for name, shape in self.layout.names().items():
            for row in range(0, shape[0], _COPIED):
                store.write(name, row, states.store.rows(name, row, min(row + _COPIED, shape[0])))

    def _states(self, store: Store) -> States:
        taps = self.computing.taps
        floors = noise_floor(self.model, tuple(taps.values()))
        return States(
            self.layout,
            store,
            token_ids=self.ids,
            model=self.model.identity.to_dict(),
            noise_floor={layer: floors[tap] for layer, tap in taps.items()},
            dtype=self.model.dtype,
            prompts=self.provenance,
            observation=self.observation,
        )

    def _fill(self, run: Run, store: MemoryStore | TensorFileWriter) -> None:
        """Compute every state that is not there yet, one piece after another."""
        lasts = isinstance(store, TensorFileWriter)
        if lasts:
            self._check_kept(run)
        done = max((Piece.of(key).stop for key in run.items), default=0)
        pieces = cut(self.layout, self.batch_tokens, Piece(done, self.layout.count))
        left = {piece.key: batches for piece, batches in pieces.items()}

        def fill(keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
            nonlocal done
            for key in keys:
                rows: dict[str, list[Tensor]] = {}
                for number, batch in enumerate(left[key]):
                    if number:
                        self.progress(done, self.layout.count, "prompts captured")
                    for layer, kept in self.computing.run(batch).items():
                        name = tensor_name(layer, batch.group)
                        store.write(name, batch.row, kept)
                        rows.setdefault(name, []).append(kept)
                    done += len(batch.prompts)
                store.sync()
                yield {"sha256": digest_of(rows)} if lasts else {}
                self.progress(done, self.layout.count, "prompts captured")  # kept by now

        run.each(list(left), dict, fill)

    def _check_kept(self, run: Run) -> None:
        """Refuse a partial file in which finished rows are not what they were."""
        if not run.items or run.path is None:
            return
        partial = run.path.parent / (TENSORS + ".partial")
        reader = TensorFileReader(partial)
        for key, item in run.items.items():
            rows = {
                tensor_name(layer, part.group): [
                    reader.rows(tensor_name(layer, part.group), part.start, part.stop)
                ]
                for part in parts_of(self.layout, Piece.of(key))
                for layer in self.layout.layers
            }
            if item.get("sha256") != digest_of(rows):
                raise BundleError(f"{partial} fails its checksum.", "Remove the folder and capture anew.")

    def finished(self, folder: Path) -> States | None:
        """The bundle in the folder, if it is the very one asked for; its ids must be in it to know that."""
        if not (folder / MANIFEST).exists():
            return None
        there = open_states(folder)
        if there.model is None or there.token_ids is None:
            return None
        plan = _plan(there.model, there.token_ids, there.layout, there.observation)
        return there if plan == self.plan else None


def _plan(
    model: dict[str, Any], ids: Sequence[Sequence[int]], layout: Layout, observation: Observation
) -> dict[str, Any]:
    return {
        "command": "capture",
        "model": model["weight_hash"],
        "dtype": model["dtype"],
        "prompts": hashlib.sha256(json.dumps([list(row) for row in ids]).encode()).hexdigest(),
        "layers": list(layout.layers),
        "positions": layout.positions,
        "observation": [observation.place, observation.rotary],
    }
