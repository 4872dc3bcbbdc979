"""Run folders, bundles, lenses and saved results, opened by what lies in them; a lens alone needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preimage.collisions.result import CollisionAudit, ContinuationScan
from preimage.errors import RunFolderError, first_line
from preimage.geometry.result import Geometry, GeometrySweep
from preimage.inversion.result import Inversion
from preimage.leak.result import FilesAudit, LeakAudit
from preimage.report.opened import Opened
from preimage.report.unfinished import PARTS
from preimage.reproduce.result import Reproduction
from preimage.storage import (
    MANIFEST,
    SCHEMA,
    KeptRun,
    Place,
    Saved,
    place_of,
    read_json,
    read_manifest,
    read_records,
    read_run,
)
from preimage.storage.places import exists, kind_of, names_in
from preimage.theory.result import TheoryReport
from preimage.training.result import Trajectory

SAVED: dict[str, type[Saved]] = {
    kind._kind: kind
    for kind in (
        Inversion, CollisionAudit, ContinuationScan, Geometry, GeometrySweep, Trajectory, TheoryReport,
        LeakAudit, FilesAudit, Reproduction,
    )
}  # fmt: skip
_COMMANDS = {  # of run.json and of what --json prints, and the kind of what came of them
    "invert": Inversion._kind, "collisions": CollisionAudit._kind, "continuations": ContinuationScan._kind,
    "geometry": Geometry._kind, "trajectory": Trajectory._kind, "leak": LeakAudit._kind,
}  # fmt: skip
_MOST = 100  # results on one page
_KINDS = "Give what --out or .save() made: a run folder, a bundle, a lens, a saved result."


def open_runs(paths: Sequence[str | os.PathLike[str] | Place]) -> list[Opened]:
    """Everything that lies at these places, in their order; what is not ours is refused by its place."""
    found: list[Opened] = []
    for path in paths:
        place = place_of(path)
        found += [_renamed(one, place, inner) for inner, one in _open(place)]
    if len(found) > _MOST:
        raise RunFolderError(f"These hold {len(found)} results.", f"Give at most {_MOST} for one page.")
    return _told_apart(found)


def _open(place: Place) -> list[tuple[str, Opened]]:
    """What lies at one place, each with its name within."""
    try:
        kind = kind_of(place)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{place} cannot be read: {first_line(error)}.", _KINDS) from error
    if kind is None:
        raise RunFolderError(f"There is no {place}.", "Check the path.")
    if kind == "file":
        return [("", _lens(place) if place.suffix == ".safetensors" else _document(place))]
    try:
        return _folder(place)
    except OSError as error:
        raise RunFolderError(
            f"{place} cannot be read: {error.strerror or first_line(error)}.", _KINDS
        ) from error


def _folder(place: Place) -> list[tuple[str, Opened]]:
    names = names_in(place)
    if "run.json" in names:
        return [("", _run(place))]
    if MANIFEST in names:
        return [("", _bundle(place))]
    if "sweep.json" in names:
        return [("", _sweep(place))]
    if exists(place / "capture" / "run.json"):
        raise _unfinished(place, read_run(place / "capture"))
    documents = [name for name in names if name.endswith(".json") and _is_ours(place / name)]
    if documents:
        return [(name.removesuffix(".json"), _document(place / name)) for name in documents]
    inner = [name for name in names[:1000] if exists(place / name / "run.json")]
    if inner:
        return [(name, _run(place / name)) for name in inner]
    holds = f"it holds {names[0]} and no run.json" if names else "it is empty"
    raise RunFolderError(f"{place} is not a run folder: {holds}.", _KINDS)


# --- a run folder --------------------------------------------------------------------------------


def _run(place: Place) -> Opened:
    kept = read_run(place)
    kind = _COMMANDS.get(str(kept.plan.get("command")))
    if not kept.done:
        return _partly(place, kept, kind)
    if kind is None:
        raise RunFolderError(f"{place} is a run of {kept.plan.get('command')!r}.", _KINDS)
    result = _decoded(place / "run.json", kind, kept.results)
    return _opened(kind, result, kept.plan, kept.records)


def _partly(place: Place, kept: KeptRun, kind: str | None) -> Opened:
    """What is finished of work that is not, where a page can be made of it."""
    if kind is None or kind not in PARTS or not kept.items:
        raise _unfinished(place, kept)
    try:
        result = PARTS[kind](kept.plan, kept.items)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise RunFolderError(f"The ledger of {place} is damaged: {first_line(error)}.", _KINDS) from error
    layers = kept.plan.get("layers")
    of = f" of {len(layers)}" if isinstance(layers, list) else ""
    said = f"This run is unfinished: {len(kept.items)}{of} pieces are finished."
    return _opened(kind, result, kept.plan, kept.records, said)


def _unfinished(place: Place, kept: KeptRun) -> RunFolderError:
    command, count = kept.plan.get("command"), len(kept.items)
    return RunFolderError(
        f"{place} is an unfinished run of preimage {command}: {count} pieces are finished, of which no page "
        "can be made.",
        "Rerun the same command: it continues.",
    )


# --- files ---------------------------------------------------------------------------------------


def _document(path: Place) -> Opened:
    """A saved result, or what --json printed."""
    document = read_json(path)
    kind, command = document.get("kind"), document.get("command")
    if document.get("schema") != SCHEMA:
        said = repr(document.get("schema"))[:60]
        raise RunFolderError(f"{path} has the schema {said}, not {SCHEMA!r}.", _KINDS)
    if command == "theory verify":
        reports = _listed(path, TheoryReport._kind, document.get("reports"))
        return Opened("", TheoryReport._kind, reports)
    if kind in SAVED:
        result: Any = SAVED[str(kind)].load(path)
    elif command in _COMMANDS and "results" in document:
        kind = _COMMANDS[str(command)]
        if kind == LeakAudit._kind and "kinds" in (document["results"] or {}):
            kind = FilesAudit._kind
        result = _decoded(path, kind, document["results"])
    else:
        raise RunFolderError(f"{path} holds no result that a page is made of.", _KINDS)
    listed = {Inversion._kind: (Inversion, list), TheoryReport._kind: (TheoryReport, list)}
    if kind in listed and not isinstance(result, list):
        result = [result]
    return _opened(str(kind), result, document, ())


def _decoded(path: Place, kind: str, value: Any) -> Any:
    """What came of a command; an inversion gives several results."""
    if kind == Inversion._kind:
        return _listed(path, kind, value)
    try:
        return SAVED[kind].from_dict(value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _listed(path: Place, kind: str, values: Any) -> list[Any]:
    try:
        if not isinstance(values, list):
            raise TypeError("its results are no list")
        return [SAVED[kind].from_dict(value) for value in values]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Place, error: Exception) -> RunFolderError:
    reason = f"it has no {first_line(error)}" if isinstance(error, KeyError) else first_line(error)
    return RunFolderError(f"{path} is damaged: {reason}.", "Copy it again, or run the command again.")


def _sweep(place: Place) -> Opened:
    sweep = GeometrySweep.load(place / "sweep.json")
    records = [
        record for run in sweep.runs for record in read_records(place / run.setting.name)
        if exists(place / run.setting.name)
    ]  # fmt: skip
    models = tuple({str(run.identity): run.identity for run in sweep.runs}.values())
    return Opened("", GeometrySweep._kind, sweep, models, tuple(records[:1] + records[-1:]))


def _bundle(place: Place) -> Opened:
    manifest = read_manifest(Path(place))
    model = manifest.get("model")
    return Opened("", "states", manifest, (model,) if model else (), read_records(place))


def _lens(path: Place) -> Opened:
    from preimage.inversion.proposers.lens_files import read_info

    lens = read_info(Path(path))
    model = {"name": lens.model, "weight_hash": lens.weight_hash}
    return Opened("", "lens", lens, (model,), (), lens.training)


def _is_ours(path: Place) -> bool:
    try:
        return str(read_json(path).get("schema")).startswith("preimage/")
    except RunFolderError:
        return False


# --- together ------------------------------------------------------------------------------------


def _opened(
    kind: str,
    result: Any,
    document: Mapping[str, Any],
    records: tuple[Mapping[str, Any], ...],
    unfinished: str = "",
) -> Opened:
    model = getattr(result, "model", None) or document.get("model")
    told = dict(model) if isinstance(model, Mapping) else None
    if kind == Trajectory._kind and told is not None:
        told.setdefault("dtype", "states in float64")
    options = getattr(result, "options", None) or document.get("options") or {}
    own = getattr(result, "record", None)
    return Opened(
        "", kind, result, (told,) if told else (), (own,) if own else records,
        options if isinstance(options, Mapping) else {}, unfinished,
    )  # fmt: skip


def _renamed(one: Opened, place: Place, inner: str) -> Opened:
    name = place.name.removesuffix(".json") or str(place)
    return Opened(**(vars(one) | {"name": f"{name}/{inner}" if inner and inner != name else name}))


def _told_apart(found: list[Opened]) -> list[Opened]:
    """Names of which no two are the same."""
    seen: dict[str, int] = {}
    apart = []
    for one in found:
        seen[one.name] = number = seen.get(one.name, 0) + 1
        apart.append(one if number == 1 else Opened(**(vars(one) | {"name": f"{one.name} ({number})"})))
    return apart
