"""What workers do for a collision search: layers, tiles of layers, prefixes; made from text and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from preimage.collisions.layer_audit import LayerAudit
from preimage.collisions.options import CollisionOptions
from preimage.collisions.prefixes import PrefixScan
from preimage.collisions.tiles import MANY, STATES, KeptTiles
from preimage.distances import PairScan, tile_count
from preimage.layers import Layer
from preimage.models import LanguageModel, model_as_told, told_model
from preimage.progress import Progress
from preimage.prompts import PromptSet
from preimage.states import States, adopt_noise, pack_ids, states_as_told, told_noise, unpack_ids
from preimage.states.capture import SPREAD
from preimage.states.pieces import PieceStore
from preimage.storage import Errand, Run, current_workers, decode
from preimage.storage.shelf import Shelf

_TILES = (
    16,
    256,
)  # that a piece is about, at least and at most: one driver hands out some 400 pieces a second
_EACH = 8  # pieces for every worker, that all end at about the same time
_FEW_LAYERS = 2  # for each worker; where there are fewer, their tiles are handed out first


class AuditJob:
    """Compares layers, or screens tiles of one, on states that are on a shelf."""

    NAME = "preimage.collisions.errands:AuditJob"

    def __init__(self, audit: LayerAudit, shelf: Shelf) -> None:
        self._audit, self._shelf = audit, shelf
        self._scan: tuple[Layer, PairScan] | None = None

    @classmethod
    def errand(cls, audit: LayerAudit, prompts: States, hard: States | None, run: Run) -> Errand:
        """What workers are told of a search whose states are captured."""
        spec = {
            "model": told_model(audit.model),
            "noise": told_noise(audit.model, audit.layers),
            "layers": list(audit.layers),
            "options": audit.options.to_dict(),
            "prompts": _told(prompts, "prompts"),
            "hard": None if hard is None else _told(hard, "hard"),
            "structure": audit.structure.told(),  # drawn once, for all
        }
        return Errand(
            cls.NAME,
            spec,
            pack_ids(audit.ids.ids),
            after=lambda key: KeptTiles.forget(run, key),
            here_too=True,
        )

    @classmethod
    def made(cls, spec: dict[str, Any], attached: bytes, shelf: Shelf) -> AuditJob:
        """One that works on this machine's own copy of the model."""
        model, ids = _model(spec), unpack_ids(attached)
        audit = LayerAudit(model, PromptSet(tuple(ids), "list", 0, 0), tuple(spec["layers"]), _options(spec))
        hard = None
        if spec["hard"] is not None:
            hard = states_as_told(spec["hard"], audit.hard_prompts, shelf)
        audit.structure.believe(spec["structure"])
        audit.use(states_as_told(spec["prompts"], ids, shelf), hard)
        return cls(audit, shelf)

    def do(self, keys: Sequence[str], inputs: bytes) -> list[Any]:
        """Layers by their numbers, or tiles of one: ``15:0-16``."""
        return [self._screen(key) if ":" in key else self._compare(key) for key in keys]

    def _compare(self, key: str) -> dict[str, Any]:
        layer = _layer(key)
        tiles = KeptTiles.of(self._shelf, layer)
        assert tiles is not None
        return asdict(self._audit.at(layer, tiles))

    def _screen(self, key: str) -> dict[str, Any]:
        name, _, some = key.partition(":")
        layer, (start, stop) = _layer(name), map(int, some.split("-"))
        if self._scan is None or self._scan[0] != layer:
            self._scan = None
            self._scan = layer, PairScan(self._audit.last(layer), counting=True)
        screen = self._scan[1].screen
        tiles = KeptTiles.of(self._shelf, layer)
        assert tiles is not None
        for tile in screen.tiles()[start:stop]:
            tiles.find(screen, tile, counting=True)
        return {}


def screen_elsewhere(
    errand: Errand, layers: Sequence[Layer], rows: int, run: Run, progress: Progress
) -> None:
    """Have the tiles of long scans found by all workers, where layers alone would not keep them busy.

    Whoever then compares a layer finds its tiles on the shelf.
    """
    workers, device = current_workers(), errand.spec["model"]["device"]
    tiles = tile_count(rows, device)
    if workers is None or tiles < MANY or len(layers) >= _FEW_LAYERS * workers.count:
        return
    size = min(max(tiles * len(layers) // (_EACH * workers.count), _TILES[0]), _TILES[1])
    keys = [f"{layer}:{at}-{min(at + size, tiles)}" for layer in layers for at in range(0, tiles, size)]
    tiling = Run(
        {"command": "screen", "rows": rows, "prompts": errand.spec["prompts"]}, run.place(f"{STATES}/tiling")
    )
    tiling.each(
        keys, dict, lambda _: (), progress, "tiles screened",
        errand=replace(errand, after=None, folder=run.path, here_too=False),
    )  # fmt: skip


class PrefixJob:
    """Compares all continuations of prefixes."""

    NAME = "preimage.collisions.errands:PrefixJob"

    def __init__(self, scan: PrefixScan) -> None:
        self._scan = scan

    @classmethod
    def errand(cls, scan: PrefixScan) -> Errand:
        """What workers are told of a scan."""
        model, layer = scan.model, scan.layer
        spec = {
            "model": told_model(model), "noise": told_noise(model, (layer,)), "layer": layer,
            "options": scan.options.to_dict(),
        }  # fmt: skip
        return Errand(cls.NAME, spec, pack_ids(scan.prefixes), here_too=True)

    @classmethod
    def made(cls, spec: dict[str, Any], attached: bytes, shelf: Shelf) -> PrefixJob:
        """One that works on this machine's own copy of the model."""
        return cls(PrefixScan(_model(spec), unpack_ids(attached), spec["layer"], _options(spec)))

    def do(self, keys: Sequence[str], inputs: bytes) -> list[Any]:
        """Prefixes by their numbers."""
        return [asdict(self._scan.at(int(key))) for key in keys]


def _model(spec: dict[str, Any]) -> LanguageModel:
    model = model_as_told(spec["model"])
    adopt_noise(model, spec["noise"])
    return model


def _options(spec: dict[str, Any]) -> CollisionOptions:
    options: CollisionOptions = decode(CollisionOptions, spec["options"])
    return options


def _told(states: States, name: str) -> dict[str, Any]:
    assert isinstance(states.store, PieceStore)
    return states.store.told(f"{STATES}/{name}/{SPREAD}")


def _layer(key: str) -> Layer:
    return "final" if key == "final" else int(key)
