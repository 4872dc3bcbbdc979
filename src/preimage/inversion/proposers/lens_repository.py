"""Lenses handed on: pushed to a folder or hub repository, pulled from one, verified.

A repository holds lens files and a registry, ``lenses.json``, that says of each what it is for, how large it
is and its checksum. Whatever it says may be wrong or hostile: it is checked before a lens is taken.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from preimage.errors import ModelError, first_line, shown
from preimage.inversion.proposers.lens import Lens
from preimage.inversion.proposers.lens_files import (
    LensFacts,
    LensInfo,
    cached_path,
    checked,
    is_digest,
    is_whole,
    lens_name,
    read_facts,
    read_info,
    read_lens,
    read_weights,
    require_serves,
)
from preimage.inversion.proposers.lens_places import REGISTRY, Content, FolderPlace, Place, place_of
from preimage.layers import Layer
from preimage.models import LanguageModel, tokenizer_hash
from preimage.observations import Tap, in_words
from preimage.storage import BEFORE, SCHEMA, copy_hashed, dumps, parse_json, replacing, sha256_file

_MOST_BYTES = 2**30  # of a lens
_MOST_LISTED = 2**24  # bytes of a registry
_PLAIN_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_ALLOWED_FALL = 0.02  # of the share of tokens named first, from what is stated to what is measured
_SHOWN = 5  # models an error names

# Shares of held-out tokens by the rank a lens gives them: ``held_out`` of preimage.training.lenses.
Measure: TypeAlias = Callable[[LanguageModel, Tap, Lens], dict[str, dict[str, float]]]


@dataclass(frozen=True)
class LensEntry:
    """A lens of a repository: its file, and what the registry says of it."""

    file: str
    sha256: str
    bytes: int
    facts: LensFacts

    @property
    def purpose(self) -> tuple[str, Tap]:
        """The weights and the tap: of one purpose there is one lens in a repository."""
        return self.facts.weight_hash, self.facts.tap

    def to_dict(self) -> dict[str, Any]:
        """Plain json types, as the registry has them."""
        return {"file": self.file, "sha256": self.sha256, "bytes": self.bytes, **self.facts.to_dict()}


@dataclass(frozen=True)
class LensCheck:
    """What came of verifying one lens; ``problems``: what does not hold."""

    file: str
    problems: tuple[str, ...] = ()
    stated: dict[str, dict[str, float]] | None = None
    measured: dict[str, dict[str, float]] | None = None  # None: not measured

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return {**vars(self), "problems": list(self.problems), "holds": not self.problems}


def push_lenses(files: Sequence[str | Path], to: str | Path) -> list[LensEntry]:
    """Put lenses into a repository, a folder or a hub id, and list them in its registry.

    One that is there for the same weights and the same layer or site is replaced. The registry changes last
    and at once: whoever reads meanwhile, or after an interruption, finds it in agreement with the files.
    """
    described = [_described(file) for file in files]
    pushed = [entry for entry, _ in described]
    _require_one_each(pushed, "Push one of them.")
    place = place_of(to)
    place.open()
    listed = _registry(place) if place.has(REGISTRY) else []
    purposes = {entry.purpose for entry in pushed}
    now = [entry for entry in listed if entry.purpose not in purposes] + pushed
    gone = {entry.file for entry in listed} - {entry.file for entry in now}
    registry = dumps({"schema": SCHEMA, "lenses": [entry.to_dict() for entry in now]})
    place.put({entry.file: content for entry, content in described}, registry, gone)
    return pushed


def pull_lenses(
    source: str | Path, model: LanguageModel | None = None, layer: Layer | None = None
) -> list[LensInfo]:
    """Copy the lenses for a model's weights from a repository into the user's cache, where they are found.

    Without a model, the lenses for any weights; with ``layer``, those of this layer and of what is seen in
    its block. Every file must be what the registry says, and say the same of itself: if one is not, none is
    taken.
    """
    place = place_of(source)
    wanted = _fitting(_registry(place), place, model, layer)
    paths = [cached_path(*entry.purpose) for entry in wanted]
    with ExitStack() as stack:
        for entry, path in zip(wanted, paths, strict=True):
            kept = place.fetch(entry.file, entry.bytes)
            temporary = stack.enter_context(replacing(path))
            size, digest = copy_hashed(kept, temporary, entry.bytes + 1)
            fault = next(_faults(entry, temporary, size, digest), None)
            if fault is not None:
                raise ModelError(f"{entry.file} of {place} is refused: {fault}.", "Ask who made it.")
            if model is not None:
                require_serves(read_info(temporary), model)
    return [read_info(path) for path in paths]


def verify_lenses(
    path: str | Path, model: LanguageModel | None = None, measure: Measure | None = None
) -> list[LensCheck]:
    """Check a lens file, or every lens of a repository in a folder, and what is missing or not listed there.

    With a model, a lens must be for its weights and tokenizer (of a folder those for other weights are left
    at that) and its shares of held-out tokens are measured anew by ``measure``.
    """
    if not Path(path).is_dir():
        return [_check_file(Path(path), model, measure)]
    place = FolderPlace(Path(path))
    listed = _registry(place)
    mine = [] if model is None else _of_weights(listed, place, model)
    checks = [
        _check(entry, place.path / entry.file, model if entry in mine else None, measure) for entry in listed
    ]
    names = {entry.file for entry in listed}
    lying = sorted(lens.name for lens in place.path.glob("*.safetensors"))
    return checks + [LensCheck(name, ("it is not listed",)) for name in lying if name not in names]


def _described(file: str | Path) -> tuple[LensEntry, Content]:
    """A lens file as a registry lists it, by a name of its own for every content."""
    path = Path(file)
    info = read_info(path)
    size, digest = path.stat().st_size, sha256_file(path)
    if size > _MOST_BYTES:
        raise ModelError(f"{path} has {size} bytes.", f"A lens has {_MOST_BYTES} at most.")
    read_weights(info)
    name = f"{lens_name(info.tap)}-{info.weight_hash[:12]}-{digest[:12]}.safetensors"
    facts = LensFacts(info.tap, info.model, info.weight_hash, info.tokenizer_hash, info.ranks)
    return LensEntry(name, digest, size, facts), Content(path, size, digest)


def _registry(place: Place) -> list[LensEntry]:
    """The lenses a place lists, every field checked."""
    path = place.fetch(REGISTRY, _MOST_LISTED)
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
        checked(document, "schema", lambda value: value in (SCHEMA, *BEFORE))
        rows = checked(document, "lenses", lambda value: isinstance(value, list))
        entries = [_entry(row) for row in rows]
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{REGISTRY} of {place} is not a registry of lenses: {first_line(error)}.",
            "`preimage lens push` writes one.",
        ) from error
    _require_one_each(entries, f"Ask who made {place}.")
    return entries


def _entry(row: Any) -> LensEntry:
    return LensEntry(
        file=checked(row, "file", _is_plain),
        sha256=checked(row, "sha256", is_digest),
        bytes=checked(row, "bytes", lambda value: is_whole(value) and value <= _MOST_BYTES),
        facts=read_facts(row),
    )


def _is_plain(name: Any) -> bool:
    """Whether it is a file's name and no way to another folder."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None and ".." not in name


def _require_one_each(entries: Sequence[LensEntry], hint: str) -> None:
    """Refuse two lenses of one purpose, or in one file."""
    seen: set[object] = set()
    for entry in entries:
        if seen & {entry.file, entry.purpose}:
            about = f"{in_words(entry.facts.tap)} of {shown(entry.facts.model)}"
            raise ModelError(f"There are two lenses for {about}.", hint)
        seen |= {entry.file, entry.purpose}


def _of_weights(listed: list[LensEntry], place: Place, model: LanguageModel) -> list[LensEntry]:
    """The lenses for a model's weights; none is an error that says for which there are some."""
    weights = model.weight_hash
    mine = [entry for entry in listed if entry.facts.weight_hash == weights]
    if not mine:
        models = {
            f"{shown(entry.facts.model)} (weights {_short(entry.facts.weight_hash)})" for entry in listed
        }
        raise ModelError(
            f"{place} has no lens for {model.name} (weights {_short(weights)}); "
            f"it has lenses for {', '.join(sorted(models)[:_SHOWN]) or 'nothing'}.",
            "Name another model, or train a lens with `preimage lens train`.",
        )
    return mine


def _other_tokenizer(facts: LensFacts, model: LanguageModel) -> str | None:
    """How the tokenizer differs from the one a lens was trained with, where both are known."""
    theirs, ours = facts.tokenizer_hash, tokenizer_hash(model.tokenizer)
    if None in (theirs, ours) or theirs == ours:
        return None
    return f"it was trained with the tokenizer {_short(theirs)}, {model.name} has {_short(ours)}"


def _fitting(
    listed: list[LensEntry], place: Place, model: LanguageModel | None, layer: Layer | None
) -> list[LensEntry]:
    """The lenses to take; none is an error that says what there is."""
    mine = listed if model is None else _of_weights(listed, place, model)
    at = [entry for entry in mine if layer in (None, entry.facts.layer)]
    if not at:
        layers = sorted({str(entry.facts.layer) for entry in mine})
        raise ModelError(
            f"{place} has no lens for layer {layer}; it has layers {', '.join(layers) or 'of nothing'}.",
            "Give one of these layers.",
        )
    others = [None if model is None else _other_tokenizer(entry.facts, model) for entry in at]
    fitting = [entry for entry, other in zip(at, others, strict=True) if other is None]
    if not fitting:
        raise ModelError(f"{at[0].file} of {place} is refused: {others[0]}.", "Use that tokenizer.")
    return fitting


def _faults(entry: LensEntry, path: Path, size: int, digest: str) -> Iterator[str]:
    """What a file is otherwise than its registry says."""
    if size != entry.bytes:
        more = f"more than {entry.bytes}" if size > entry.bytes else size
        yield f"it has {more} bytes, the registry says {entry.bytes}"
    elif digest != entry.sha256:
        yield f"its sha256 is {_short(digest)}, the registry says {_short(entry.sha256)}"
    else:
        try:
            info = read_info(path)
            read_weights(info)
        except ModelError as error:
            yield f"it is not a lens ({first_line(error.__cause__ or error)})"
            return
        own, listed = info.to_dict(), entry.facts.to_dict()
        for name in (name for name in own | listed if own.get(name) != listed.get(name)):
            said, stated = _short(own.get(name)), _short(listed.get(name))
            yield f"it says {name} {said} of itself, the registry says {stated}"


def _check_file(path: Path, model: LanguageModel | None, measure: Measure | None) -> LensCheck:
    """Everything that can be said of a lens that no registry lists."""
    if not path.is_file():
        raise ModelError(f"There is no file {path}.", "Check the path.")
    try:
        entry, _ = _described(path)
    except ModelError as error:
        return LensCheck(str(path), (error.message.rstrip("."),))
    return replace(_check(entry, path, model, measure), file=str(path))


def _check(entry: LensEntry, path: Path, model: LanguageModel | None, measure: Measure | None) -> LensCheck:
    """Everything that can be said of one lens."""
    stated = entry.facts.ranks
    if not path.is_file():
        return LensCheck(entry.file, ("it is missing",), stated)
    faults = tuple(_faults(entry, path, path.stat().st_size, sha256_file(path)))
    if faults or model is None:
        return LensCheck(entry.file, faults, stated)
    try:
        lens = read_lens(path, model)
    except ModelError as error:
        return LensCheck(entry.file, (error.message.rstrip("."),), stated)
    measured = None if measure is None else measure(model, entry.facts.tap, lens)
    other = _other_tokenizer(entry.facts, model)
    problems = ([other] if other else []) + list(_falls(stated, measured or {}))
    return LensCheck(entry.file, tuple(problems), stated, measured)


def _falls(stated: dict[str, dict[str, float]], measured: dict[str, dict[str, float]]) -> Iterator[str]:
    for kind in stated.keys() & measured.keys():
        said, now = (ranks[kind]["rank0"] for ranks in (stated, measured))
        if said - now > _ALLOWED_FALL:
            yield f"of held-out {kind} it names {now:.2%} first, not {said:.2%}"


def _short(value: Any) -> str:
    return str(value)[:12] if is_digest(value) else reprlib.repr(value)
