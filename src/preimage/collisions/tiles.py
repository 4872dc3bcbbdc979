"""Finished tiles of a long scan on the disk, so that one that was stopped goes on where it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from preimage.distances import Screen, Tile, TileMinima
from preimage.storage import write_tensors


class KeptTiles:
    """Runs tiles and keeps each as it ends, where there are so many that doing them again would hurt.

    A tile is known by the arithmetic and the ranges it was screened in; the rows must be the same, which the
    run folder around it sees to.
    """

    def __init__(self, folder: Path, at_least: int = 64) -> None:
        self._folder, self._at_least = folder, at_least

    def __call__(self, screen: Screen, tiles: Sequence[Tile], counting: bool) -> Iterator[TileMinima]:
        """Every tile's findings, from the disk where they are there."""
        keeping = len(tiles) >= self._at_least
        for tile in tiles:
            path = self._folder / _name(screen, tile, counting)
            minima = _load(path, screen) if keeping else None
            if minima is None:
                minima = screen.find(tile, counting)
                if keeping:
                    _save(path, minima)
            yield minima

    def forget(self) -> None:
        """Remove what was kept."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _name(screen: Screen, tile: Tile, counting: bool) -> str:
    ranges = "-".join(f"{part.start}-{part.stop}" for part in tile)
    return f"{screen.arithmetic.name}-{ranges}{'-counted' if counting else ''}.safetensors"


def _load(path: Path, screen: Screen) -> TileMinima | None:
    """What was kept; nothing where there is none or it is damaged."""
    try:
        kept = load_file(path, device=str(screen.rows.left.device))
    except (OSError, SafetensorError):
        return None
    counts = None
    if "bins" in kept:
        counts = torch.zeros(int(kept["size"]), dtype=torch.int64, device=kept["rows"].device)
        counts[kept["bins"]] = kept["often"]
    return TileMinima(kept["rows"], kept.get("columns"), counts)


def _save(path: Path, minima: TileMinima) -> None:
    tensors = {"rows": minima.rows}
    if minima.columns is not None:
        tensors["columns"] = minima.columns
    if minima.counts is not None:
        bins = minima.counts.nonzero().flatten()
        size = torch.tensor(len(minima.counts))
        tensors |= {"bins": bins, "often": minima.counts[bins], "size": size}
    write_tensors(path, tensors)
