"""What is finished of work that is not: as much of its result as a page can show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from preimage.collisions.result import CollisionAudit, Continuation, ContinuationScan, LayerCollisions
from preimage.geometry.result import Geometry, LayerGeometry, LayerSet
from preimage.inversion.result import Inversion
from preimage.layers import Layer
from preimage.storage import decode
from preimage.training.result import Checkpoint, Trajectory

Plan: TypeAlias = Mapping[str, Any]
Items: TypeAlias = Mapping[str, Any]


def _part_of_inversion(plan: Plan, items: Items) -> list[Inversion]:
    return [decode(Inversion, items[key]) for key in sorted(items, key=int)]


def _in_order(plan: Plan, items: Items) -> list[tuple[Layer, Any]]:
    return [(layer, items[str(layer)]) for layer in plan["layers"] if str(layer) in items]


def _part_of_audit(plan: Plan, items: Items) -> CollisionAudit:
    layers = tuple(decode(LayerCollisions, item) for _, item in _in_order(plan, items))
    return CollisionAudit(
        model=plan["model"], prompts=layers[0].spacing.states, duplicates_removed=0, lengths=(0, 0),
        source="", fingerprint=plan["prompts"], options=plan["options"], layers=layers,
    )  # fmt: skip


def _part_of_scan(plan: Plan, items: Items) -> ContinuationScan:
    prefixes = tuple(decode(Continuation, items[key]) for key in sorted(items, key=int))
    return ContinuationScan(plan["model"], plan["layer"], plan["options"], prefixes)


def _part_of_geometry(plan: Plan, items: Items) -> Geometry:
    by_bits: dict[int | None, dict[Layer, LayerGeometry]] = {}
    for layer, item in _in_order(plan, items):
        for one in item["precisions"]:
            by_bits.setdefault(one["bits"], {})[layer] = decode(LayerGeometry, one["geometry"])
    full = by_bits.pop(None)
    quantised = {bits: LayerSet(layers) for bits, layers in by_bits.items() if bits is not None}
    return Geometry(next(iter(full.values())).states, "", plan["options"], full, quantised)


def _part_of_trajectory(plan: Plan, items: Items) -> Trajectory:
    options = plan["options"]
    points = tuple(decode(Checkpoint, items[key]) for key in sorted(items, key=int))
    model = {"name": f"{options['family']}-{options['size']}"}
    return Trajectory(options, model, plan["probes"], plan["text"], points)


# By the kind of the result, from a run's plan and its finished pieces.
PARTS: dict[str, Callable[[Plan, Items], Any]] = {
    Inversion._kind: _part_of_inversion,
    CollisionAudit._kind: _part_of_audit,
    ContinuationScan._kind: _part_of_scan,
    Geometry._kind: _part_of_geometry,
    Trajectory._kind: _part_of_trajectory,
}
