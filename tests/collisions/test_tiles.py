"""Tiles of a search that were finished are kept (J1)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from preimage.collisions.tiles import KeptTiles
from preimage.distances import PairScan, distance_distribution, find_closest
from preimage.distances.screen import EachTile, Screen, Tile, TileMinima, here
from preimage.storage.shelf import FolderShelf


def test_finished_tiles_are_found_again(tmp_path: Path) -> None:  # J1
    x = torch.randn(1500, 12, generator=torch.Generator().manual_seed(7))
    run: list[Tile] = []

    class Stopping(Screen):
        def find(self, tile: Tile, counting: bool = False) -> TileMinima:
            if len(run) == 9:
                raise KeyboardInterrupt
            run.append(tile)
            return super().find(tile, counting)

    def scan(each: EachTile) -> PairScan:
        return PairScan(x, tile=256, counting=True, each=each)

    def stopped(screen: Screen, tiles: Sequence[Tile], counting: bool) -> Iterator[TileMinima]:
        screen.__class__ = Stopping
        return KeptTiles(FolderShelf(tmp_path), "tiles", at_least=1)(screen, tiles, counting)

    with pytest.raises(KeyboardInterrupt):
        find_closest(scan(stopped))
    folder = tmp_path / "tiles"
    kept = sorted(folder.iterdir())
    assert len(kept) == 9
    kept[0].write_bytes(kept[0].read_bytes()[:-20])  # a damaged one is made again
    flipped = bytearray(kept[1].read_bytes())
    flipped[-100] ^= 1  # in the numbers themselves
    kept[1].write_bytes(flipped)
    before = {path.name: path.stat().st_mtime_ns for path in kept[2:]}
    again, fresh = scan(KeptTiles(FolderShelf(tmp_path), "tiles", at_least=1)), scan(here)
    assert find_closest(again, 5) == find_closest(fresh, 5)
    assert torch.equal(again.nearest.indices, fresh.nearest.indices)
    assert distance_distribution(again).quantile(0.5) == distance_distribution(fresh).quantile(0.5)
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}
    assert len(list(folder.iterdir())) == 21
