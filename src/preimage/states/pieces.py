"""States in files of some prompts each: written by whoever computed them, read a layer at a time by anybody.

A file is safetensors, its layers one behind the other, so that one read fetches a layer of a piece; the
checksum of each is in its header.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from preimage.errors import RunFolderError
from preimage.layers import Layer
from preimage.models import LanguageModel, model_as_told
from preimage.observations import Observation
from preimage.states.batches import Batch, Part, Piece, cut, parts_of
from preimage.states.layout import Layout, group_by_length, tensor_name
from preimage.states.states import DTYPES, States
from preimage.storage.files import Buffer
from preimage.storage.shelf import Shelf
from preimage.storage.tensor_file import header_of, pack, tensor_bytes, unpack

_READERS = 8  # files read at once
_HEADER = 8  # bytes that say how long the header is


class PieceStore:
    """Rows of states out of the pieces on a shelf; of the file last looked at, the layer stays in memory."""

    def __init__(
        self, shelf: Shelf, folder: str, layout: Layout, dtype: torch.dtype, pieces: Sequence[Piece]
    ) -> None:
        self._shelf, self._folder, self._layout, self._dtype = shelf, folder, layout, dtype
        self._pieces = sorted(pieces)
        self._begins = [begin for begin, _ in self._pieces]
        firsts, at = [], 0
        for group in layout.groups:
            firsts.append(at)
            at += len(group.prompts)
        self._firsts = firsts
        self._header = lru_cache(maxsize=None)(self._read_header)
        self._part = lru_cache(maxsize=2)(self._read_part)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a named tensor."""
        layer, group = name.removeprefix("layer.").split(".group.")
        index = int(group)
        first = self._firsts[index]
        low, high = (bisect_right(self._begins, first + row) for row in (start, stop - 1))
        pieces = self._pieces[low - 1 : high]

        def part(piece: Piece) -> Tensor:
            begin = max(piece.start, first) - first  # the row of the group that the piece begins with
            return self._part(piece, layer, index)[max(start - begin, 0) : stop - begin]

        if len(pieces) == 1:
            return part(pieces[0])
        with ThreadPoolExecutor(_READERS) as pool:  # reading and hashing let go of the interpreter lock
            return torch.cat(list(pool.map(part, pieces)))

    def told(self, inside: str) -> dict[str, Any]:
        """Where somebody else finds the same, whose shelf has this one's in the folder ``inside``."""
        layout = self._layout
        return {
            "folder": f"{inside}/{self._folder}", "pieces": [piece.key for piece in self._pieces],
            "layers": list(layout.layers), "positions": layout.positions, "width": layout.d_model,
            "dtype": str(self._dtype).removeprefix("torch."),
        }  # fmt: skip

    def _read_part(self, piece: Piece, layer: str, group: int) -> Tensor:
        """One layer of one piece, of one group; its bytes are held against their checksum."""
        name, (header, begin) = self._name(piece), self._header(piece)
        parts = parts_of(self._layout, piece)
        tensors = [f"layer.{layer}.group.{part.group}" for part in parts]
        try:
            start, stop = header[tensors[0]]["data_offsets"][0], header[tensors[-1]]["data_offsets"][1]
            content = self._shelf.get(name, begin + start, begin + stop)
            if hashlib.sha256(content).hexdigest() != header["__metadata__"][f"sha256.{layer}"]:
                raise ValueError("fails its checksum")
            entry = header[f"layer.{layer}.group.{group}"]
            low, high = (offset - start for offset in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(content[low:high]), dtype=self._dtype)
            return flat.view(*entry["shape"])
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise _damaged(name, error) from error

    def _read_header(self, piece: Piece) -> tuple[dict[str, Any], int]:
        name = self._name(piece)
        length = int.from_bytes(self._shelf.get(name, 0, _HEADER), "little")
        if length > 1 << 26:
            raise _damaged(name, "its header is too large")
        try:
            return dict(json.loads(self._shelf.get(name, _HEADER, _HEADER + length))), _HEADER + length
        except (ValueError, RecursionError) as error:
            raise _damaged(name, error) from error

    def _name(self, piece: Piece) -> str:
        return f"{self._folder}/{piece.key}.safetensors"


def _damaged(name: str, reason: object) -> RunFolderError:
    return RunFolderError(f"{name} is damaged: it {reason}.", "Give another folder, or remove this one.")


def file_of(layout: Layout, piece: Piece, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[Buffer]:
    """The file of a piece in parts, from its tensors by name: their own memory, which is not copied."""
    parts = parts_of(layout, piece)
    width = layout.d_model
    shapes: dict[str, tuple[int, ...]] = {}
    sums: dict[str, str] = {}
    content: list[Buffer] = []
    for layer in layout.layers:
        digest = hashlib.sha256()
        for part in parts:
            name, length = tensor_name(layer, part.group), _kept_length(layout, part)
            shapes[name] = (part.stop - part.start, length, width)
            raw = tensor_bytes(tensors[name])
            digest.update(raw)
            content.append(raw)
        sums[f"sha256.{layer}"] = digest.hexdigest()
    return [header_of(shapes, dtype, sums), *content]


def digest_of(rows: Mapping[str, Sequence[Tensor]]) -> str:
    """The checksum of named rows, whatever parts they come in, by the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(rows):
        for part in rows[name]:
            digest.update(tensor_bytes(part))
    return digest.hexdigest()


def copied(layout: Layout, piece: Piece, states: States) -> list[Buffer]:
    """The file of a piece, from states that are there already."""
    rows = {
        tensor_name(layer, part.group): states.store.rows(
            tensor_name(layer, part.group), part.start, part.stop
        )
        for layer in layout.layers
        for part in parts_of(layout, piece)
    }
    return file_of(layout, piece, rows, states.dtype)


def _kept_length(layout: Layout, part: Part) -> int:
    return layout.groups[part.group].length if layout.positions == "all" else 1


def states_as_told(told: Mapping[str, Any], ids: Sequence[Sequence[int]], shelf: Shelf) -> States:
    """States that somebody else captured, read from a shelf."""
    groups = group_by_length([len(row) for row in ids])
    layout, dtype = (
        Layout(groups, tuple(told["layers"]), told["positions"], told["width"]),
        DTYPES[told["dtype"]],
    )
    pieces = [Piece.of(key) for key in told["pieces"]]
    store = PieceStore(shelf, told["folder"], layout, dtype, pieces)
    return States(layout, store, token_ids=ids, model=None, noise_floor={}, dtype=dtype)


class Computing:
    """Prompts run through a model, and what is kept of them."""

    def __init__(
        self, model: LanguageModel, ids: Sequence[Sequence[int]], layout: Layout, observation: Observation
    ) -> None:
        self.model, self.ids, self.layout = model, ids, layout
        self.taps = {layer: observation.tap(layer, model.n_layers) for layer in layout.layers}

    def run(self, batch: Batch) -> dict[Layer, Tensor]:
        """The states of a batch, on the CPU."""
        ids = torch.tensor([self.ids[i] for i in batch.prompts])
        states = self.model.states(ids, tuple(self.taps.values()))
        whole = self.layout.positions == "all"
        return {
            layer: (states[tap] if whole else states[tap][:, -1:]).cpu() for layer, tap in self.taps.items()
        }

    def file(self, piece: Piece, batches: Sequence[Batch]) -> list[Buffer]:
        """The file of a piece."""
        rows: dict[str, list[Tensor]] = {}
        for batch in batches:
            for layer, kept in self.run(batch).items():
                rows.setdefault(tensor_name(layer, batch.group), []).append(kept)
        tensors = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}
        return file_of(self.layout, piece, tensors, self.model.dtype)


class CaptureJob:
    """Captures pieces for somebody else: made from a spec, its files go on a shelf."""

    NAME = "preimage.states.pieces:CaptureJob"

    def __init__(self, computing: Computing, shelf: Shelf, folder: str, batch_tokens: int) -> None:
        self._computing, self._shelf, self._folder, self._tokens = computing, shelf, folder, batch_tokens

    @staticmethod
    def spec(
        model: Mapping[str, Any], layout: Layout, seen: Observation, folder: str, tokens: int
    ) -> dict[str, Any]:
        """What one is made from, beside the prompts."""
        return {
            "model": dict(model), "layers": list(layout.layers), "positions": layout.positions,
            "width": layout.d_model, "observe": [seen.place, seen.rotary], "folder": folder,
            "batch_tokens": tokens,
        }  # fmt: skip

    @classmethod
    def made(cls, spec: dict[str, Any], attached: bytes, shelf: Shelf) -> CaptureJob:
        """One that works on this machine's own copy of the model."""
        model, ids = model_as_told(spec["model"]), unpack_ids(attached)
        layout = Layout(group_by_length([len(row) for row in ids]), tuple(spec["layers"]), spec["positions"],
                        spec["width"])  # fmt: skip
        computing = Computing(model, ids, layout, Observation(*spec["observe"]))
        return cls(computing, shelf, spec["folder"], spec["batch_tokens"])

    def do(self, keys: Sequence[str], inputs: bytes) -> list[Any]:
        """Capture pieces and put them on the shelf."""
        for key in keys:
            piece = Piece.of(key)
            batches = [
                one for some in cut(self._computing.layout, self._tokens, piece).values() for one in some
            ]
            self._shelf.put(f"{self._folder}/{key}.safetensors", *self._computing.file(piece, batches))
        return [{} for _ in keys]


def pack_ids(ids: Sequence[Sequence[int]]) -> bytes:
    """Token ids of prompts as bytes."""
    lengths = torch.tensor([len(row) for row in ids])
    return pack({"ids": torch.tensor([token for row in ids for token in row]), "lengths": lengths})


def unpack_ids(content: bytes) -> list[tuple[int, ...]]:
    """The inverse of :func:`pack_ids`."""
    held = unpack(content)
    parts = held["ids"].split(held["lengths"].tolist())
    return [tuple(part.tolist()) for part in parts]
