"""Finished tiles of a long scan, kept beside the run, so that one that was stopped goes on where it was.

Whoever finishes a tile puts it there; whoever needs it finds it. Each carries its checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from safetensors import SafetensorError

from preimage.distances import Screen, Tile, TileMinima, here
from preimage.errors import RunFolderError
from preimage.layers import Layer
from preimage.storage import Run
from preimage.storage.places import remove_all
from preimage.storage.shelf import Shelf
from preimage.storage.tensor_file import pack, unpack

STATES = "states"  # in the run folder, until the run is done
MANY = 64  # tiles of one scan, from which on doing them again would hurt
_DIGEST = 32  # bytes


class KeptTiles:
    """Runs tiles and keeps each as it ends, where there are many.

    A tile is known by the arithmetic and the ranges it was screened in; the rows must be the same, which the
    run folder around it sees to.
    """

    def __init__(self, shelf: Shelf, folder: str, at_least: int = MANY) -> None:
        self._shelf, self._folder, self._at_least = shelf, folder, at_least

    @classmethod
    def of(cls, shelf: Shelf | None, layer: Layer) -> KeptTiles | None:
        """Those of a layer; None where there is no shelf."""
        return None if shelf is None else cls(shelf, _folder(layer))

    @staticmethod
    def forget(run: Run, layer: Layer | str) -> None:
        """Remove those of a layer from the folder of a run, where it has one."""
        place = run.place(_folder(layer))
        if place is not None:
            remove_all(place)

    def __call__(self, screen: Screen, tiles: Sequence[Tile], counting: bool) -> Iterable[TileMinima]:
        """Every tile's findings, from the shelf where they are there."""
        if len(tiles) >= self._at_least:
            return (self.find(screen, tile, counting) for tile in tiles)
        return here(screen, tiles, counting)

    def find(self, screen: Screen, tile: Tile, counting: bool) -> TileMinima:
        """What one tile knows, from the shelf or put there now."""
        name = f"{self._folder}/{_name(screen, tile, counting)}"
        minima = self._load(name, screen)
        if minima is None:
            minima = screen.find(tile, counting)
            content = _pack(minima)
            self._shelf.put(name, content, hashlib.sha256(content).digest())
        return minima

    def _load(self, name: str, screen: Screen) -> TileMinima | None:
        """What was kept; nothing where there is none or it is damaged: it is found again."""
        try:
            content = self._shelf.get(name, 0, None)
            if hashlib.sha256(content[:-_DIGEST]).digest() != content[-_DIGEST:]:
                return None
            kept = {key: part.to(screen.rows.left.device) for key, part in unpack(content[:-_DIGEST]).items()}
        except (RunFolderError, SafetensorError):
            return None
        counts = None
        if "bins" in kept:
            counts = torch.zeros(int(kept["size"]), dtype=torch.int64, device=kept["rows"].device)
            counts[kept["bins"]] = kept["often"]
        return TileMinima(kept["rows"], kept.get("columns"), counts)


def _folder(layer: Layer | str) -> str:
    return f"{STATES}/tiles-{layer}"


def _name(screen: Screen, tile: Tile, counting: bool) -> str:
    ranges = "-".join(f"{part.start}-{part.stop}" for part in tile)
    return f"{screen.arithmetic.name}-{ranges}{'-counted' if counting else ''}.safetensors"


def _pack(minima: TileMinima) -> bytes:
    tensors = {"rows": minima.rows}
    if minima.columns is not None:
        tensors["columns"] = minima.columns
    if minima.counts is not None:
        bins = minima.counts.nonzero().flatten()
        size = torch.tensor(len(minima.counts))
        tensors |= {"bins": bins, "often": minima.counts[bins], "size": size}
    return pack(tensors)
