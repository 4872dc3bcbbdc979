"""``preimage.read_files``: what files and folders that somebody has give away, and how that is known.

First what stands in the clear: that needs no model. Then states are inverted, each prompt from the lowest
place that was kept of it. Pages of caches are read one by one from the values of the first block, which
depend on one token alone, put in order by their names, and held against the numbers of the deepest block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.errors import PreimageError, StatesError
from preimage.inversion import Inversion, invert
from preimage.leak.block_hashes import read_names, scheme_of
from preimage.leak.chains import arrange
from preimage.leak.folder import Found, read_paths
from preimage.leak.holdings import Clear, Holding, Piece, Seen, Sizes, Told
from preimage.leak.result import FileKind, FilePrompt, FilesAudit
from preimage.models import LanguageModel
from preimage.observations import Site
from preimage.progress import Listener, Progress, reporting, silent
from preimage.states import head_sizes

log = logging.getLogger(__name__)

LISTED = 1000  # prompts that are listed with their ids; more are counted
_TOGETHER = 64  # pieces read in one call
_UNKNOWN_VOCABULARY = 1 << 18  # of names of single tokens, where no model was named


@dataclass(frozen=True)
class _Part:
    """A piece, and the file it is in."""

    holding: Holding
    piece: Piece


def sizes_of(model: LanguageModel) -> Sizes:
    """What raw pages do not say of themselves."""
    heads, size = head_sizes(model)
    return Sizes(model.n_layers, model.d_model, heads, size, model.vocab_size)


def read_files(
    paths: str | Path | Sequence[str | Path],
    model: LanguageModel | None = None,
    *,
    told: Told | None = None,
    timeout: float = 60.0,
    progress: Listener = silent,
) -> FilesAudit:
    """What files and folders hold of prompts: in the clear, and by inversion with ``model``.

    Without a model only what stands in the clear, and names that give pages of one token away, are read.
    ``told``: what files do not say themselves (:class:`preimage.leak.holdings.Told`). ``timeout``: seconds a
    prompt may cost. A file that cannot be read is in ``unread`` with the reason, and stops nothing; a single
    one that was asked for by itself is an error.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    said = told or Told()
    if model is not None and said.sizes is None:
        said = replace(said, sizes=sizes_of(model))
    began = time.perf_counter()
    with reporting(progress) as report:
        found = read_paths([Path(path) for path in given], said, report)
        parts = [_Part(holding, piece) for holding in found.holdings for piece in holding.pieces]
        work = _Reading(model, timeout, report)
        prompts = [*_in_the_clear(parts, model), *work.whole(parts), *work.pages(parts)]
    return FilesAudit(
        model=None if model is None else model.identity.to_dict(),
        paths=tuple(str(path) for path in given),
        kinds=_kinds(found),
        prompts=tuple(prompts[:LISTED]),
        total=len(prompts),
        unread=tuple((str(path), why) for path, why in found.unread) + work.failed,
        others=found.others,
        seconds=time.perf_counter() - began,
    )


def _kinds(found: Found) -> tuple[FileKind, ...]:
    """Files by what they are, with what is to be said of them."""
    kinds: dict[str, list[Holding]] = {}
    for holding in found.holdings:
        kinds.setdefault(holding.kind, []).append(holding)
    return tuple(
        FileKind(
            kind=kind,
            files=len(held),
            pieces=sum(len(holding.pieces) for holding in held),
            clear=sum(bool(piece.clear) for holding in held for piece in holding.pieces),
            about=held[0].about,
            notes=tuple(dict.fromkeys(note for holding in held for note in holding.notes if note)),
            names=tuple(holding.paths[0].name for holding in held[:_TOGETHER]),
        )
        for kind, held in kinds.items()
    )


def _in_the_clear(parts: Sequence[_Part], model: LanguageModel | None) -> Iterator[FilePrompt]:
    for part in parts:
        for clear in part.piece.clear:
            yield _clear(part, clear, model)


def _clear(part: _Part, clear: Clear, model: LanguageModel | None) -> FilePrompt:
    text = clear.text
    if text is None and clear.token_ids is not None and model is not None:
        text = _text(model, clear.token_ids)
    return FilePrompt(
        name=part.piece.name, kind=part.holding.kind, how=f"in the clear: {clear.where}", status="clear",
        token_ids=clear.token_ids or (), text=text, confidence=1.0,
        proof="It stands there; no model is needed.", seconds=0.0,
    )  # fmt: skip


def _text(model: LanguageModel, ids: Sequence[int]) -> str | None:
    return model.decode(ids) if all(0 <= one < model.vocab_size for one in ids) else None


class _Reading:
    """Inversion of what files hold."""

    def __init__(self, model: LanguageModel | None, timeout: float, progress: Progress) -> None:
        self._model, self._timeout, self._progress = model, timeout, progress
        self._failed: dict[int, tuple[str, str]] = {}  # by part
        self._named: set[int] = set()  # parts that were read by their names alone

    # Prompts whose states are there from the beginning.

    def whole(self, parts: Sequence[_Part]) -> Iterator[FilePrompt]:
        """Every piece that begins a prompt, each from the lowest place that was kept of it."""
        if self._model is None:
            return
        groups: dict[tuple[object, ...], list[tuple[_Part, Seen]]] = {}
        for part in parts:
            seen = _lowest(part.piece) if part.piece.block is None else None
            if seen is None:
                continue
            if part.piece.start not in (0, None):
                self._fail(part, "Its first tokens are missing, and what came before them is not known.")
                continue
            one_vector = seen.observation.positions in ("last", "mean")
            if part.piece.start is None and not one_vector:
                continue
            length = part.piece.tokens if seen.observation.at is not None else None
            groups.setdefault((seen.layer, seen.observation, length), []).append((part, seen))
        done, total = 0, sum(map(len, groups.values()))
        for some in groups.values():
            for start in range(0, len(some), _TOGETHER):
                lot = some[start : start + _TOGETHER]
                yield from self._inverted(lot)
                done += len(lot)
                self._progress(done, total, "prompts inverted")

    def _inverted(self, lot: Sequence[tuple[_Part, Seen]]) -> Iterator[FilePrompt]:
        rows = list(self._rows(lot))
        found = self._invert([row for _, row in rows], rows[0][0][1]) if rows else []
        for ((part, seen), _), one in zip(rows, found, strict=True):
            known = [clear.token_ids for clear in part.piece.clear if clear.token_ids]
            yield FilePrompt(
                name=part.piece.name, kind=part.holding.kind, how=f"inverted from {_place(seen)}",
                status=one.status, token_ids=one.reading.token_ids, text=one.reading.text,
                confidence=_mean(one.reading.confidence), proof=_proof(one, known), seconds=one.seconds,
            )  # fmt: skip

    def _rows(self, lot: Iterable[tuple[_Part, Seen]]) -> Iterator[tuple[tuple[_Part, Seen], Tensor]]:
        for part, seen in lot:
            try:
                rows = seen.read()
                if not bool(torch.isfinite(rows.float()).all()):
                    raise StatesError("It holds NaN or infinity.", "Save it again.")
                one = seen.observation.positions in ("last", "mean") and rows.ndim == 2
                yield (part, seen), rows[0] if one else rows
            except PreimageError as error:
                self._fail(part, str(error))

    def _invert(self, rows: list[Tensor], seen: Seen) -> list[Inversion]:
        assert self._model is not None
        types = {row.dtype for row in rows}
        if len(types) > 1:
            rows = [row.float() for row in rows]
        return invert(self._model, rows, seen.layer, observe=seen.observation, timeout=self._timeout)

    def _fail(self, part: _Part, why: str) -> None:
        self._failed.setdefault(id(part), (part.piece.name, why))  # the first reason is the nearest

    @property
    def failed(self) -> tuple[tuple[str, str], ...]:
        """What was not read, and why."""
        return tuple(self._failed.values())

    # Pages of caches.

    def pages(self, parts: Sequence[_Part]) -> Iterator[FilePrompt]:
        """Prompts whose pages are named: read page by page, put in order and proved by the names."""
        paged = [part for part in parts if part.piece.block is not None]
        if not paged:
            return
        ids = self._page_ids(paged) if self._model is not None else [None] * len(paged)
        named = [(part.piece.block, one) for part, one in zip(paged, ids, strict=True) if part.piece.block]
        arranged = arrange(named)
        proved: set[int] = set()
        for prompt in arranged.prompts():
            proved.update(prompt.pages)
            own = [paged[index] for index in prompt.pages]
            start = "" if prompt.behind is None else ", behind a page that was not read"
            proof = f"The names of {_pages(len(own))} are made of these ids ({prompt.scheme}){start}."
            if prompt.behind is None:
                proof += self._agreement(own, prompt.token_ids)
            yield self._paged(own, prompt.token_ids, "recovered", proof)
        left = [index for index in range(len(paged)) if index not in proved]
        yield from self._by_name_alone([paged[index] for index in left if ids[index] is None])
        for index in left:
            read = ids[index]
            if read is not None:
                why = "No name here is made of these ids: a salt or a missing page may stand before them."
                yield self._paged([paged[index]], read, "likely", why)
            elif self._model is not None and id(paged[index]) not in self._named:
                self._fail(paged[index], _why_unread(paged[index]))

    def _page_ids(self, paged: Sequence[_Part]) -> list[tuple[int, ...] | None]:
        """The ids of every page from the values of the first block; None where they are not there."""
        ids: list[tuple[int, ...] | None] = [None] * len(paged)
        groups: dict[object, list[tuple[int, Seen]]] = {}
        for index, part in enumerate(paged):
            seen = _first_values(part.piece)
            if seen is not None:
                groups.setdefault(seen.observation, []).append((index, seen))
        done, total = 0, sum(map(len, groups.values()))
        for some in groups.values():
            for start in range(0, len(some), _TOGETHER):
                lot = some[start : start + _TOGETHER]
                rows = list(self._rows((paged[index], seen) for index, seen in lot))
                at = {id(paged[index]): index for index, _ in lot}
                found = self._invert([row for _, row in rows], rows[0][0][1]) if rows else []
                for ((part, _), _), one in zip(rows, found, strict=True):
                    if one.status in ("recovered", "ambiguous", "likely"):
                        ids[at[id(part)]] = tuple(one.reading.token_ids)
                done += len(lot)
                self._progress(done, total, "pages read")
        return ids

    def _paged(self, own: Sequence[_Part], ids: Sequence[int], status: str, proof: str) -> FilePrompt:
        name = own[0].piece.name if len(own) == 1 else f"{own[0].piece.name} and {_pages(len(own) - 1)} more"
        return FilePrompt(
            name=name, kind=own[0].holding.kind, how="pages, from the values of block 1", status=status,
            token_ids=tuple(ids), text=None if self._model is None else _text(self._model, ids),
            confidence=1.0 if status == "recovered" else 0.0, proof=proof, seconds=0.0,
        )  # fmt: skip

    def _agreement(self, own: Sequence[_Part], ids: Sequence[int]) -> str:
        """How far the deepest values of these pages are from the model's own for these ids."""
        model = self._model
        deepest = [_deepest_values(part.piece) for part in own]
        if model is None or not deepest or deepest[0] is None:
            return ""
        layer = deepest[0].layer
        if any(one is None or one.layer != layer for one in deepest) or deepest[0].observation.kept:
            return ""
        stored = torch.cat([one.read().float() for one in deepest if one is not None])
        site = Site(int(layer), "values")
        ours = model.states(torch.tensor([list(ids[: len(stored)])]), (site,))[site][0].float().cpu()
        if ours.shape != stored.shape:
            return ""
        away = float((row_distances(ours, stored) / norms(ours).clamp_min(1e-30)).median())
        return f" The values of block {layer} are the model's own for them, to {away:.2g} of their length."

    def _by_name_alone(self, unread: Sequence[_Part]) -> Iterator[FilePrompt]:
        """Pages of one token, of which nothing but the name can be read."""
        by_scheme: dict[str, list[_Part]] = {}
        for part in unread:
            block = part.piece.block
            if block is not None and block.page == 1 and scheme_of(block.scheme).roots:
                by_scheme.setdefault(block.scheme, []).append(part)
        size = _UNKNOWN_VOCABULARY if self._model is None else self._model.vocab_size
        for scheme, some in by_scheme.items():
            of = {part.piece.block.digest: part for part in some if part.piece.block is not None}
            read = read_names(list(of), scheme, 1, size, budget=max(200_000_000, size * len(of) * 2))
            for prompt in read.prompts:
                own = [of[name] for name in prompt.names]
                self._named.update(map(id, own))
                found = self._paged(
                    own, prompt.token_ids, "recovered",
                    f"Read from the names of {_pages(len(own))} of one token alone, which are made of these "
                    f"ids ({scheme}).",
                )  # fmt: skip
                yield replace(found, how="the names of its pages alone")


def _lowest(piece: Piece) -> Seen | None:
    """The place of a piece that is easiest to read: whole states of the lowest layer, else of a cache."""
    return min(piece.seen, key=_ease, default=None)


def _ease(seen: Seen) -> tuple[int, float]:
    depth = float("inf") if seen.layer == "final" else float(seen.layer)
    order = {"residual": 0, "values": 1, "kv": 1, "keys": 2}
    return (1 if depth == 0 else 0, depth + order.get(seen.observation.place, 3) / 10)


def _first_values(piece: Piece) -> Seen | None:
    for seen in piece.seen:
        if seen.layer == 1 and seen.observation.place == "values":
            return seen
    return None


def _deepest_values(piece: Piece) -> Seen | None:
    values = [seen for seen in piece.seen if seen.observation.place == "values"]
    return max(values, key=lambda seen: int(seen.layer), default=None)


def _why_unread(part: _Part) -> str:
    """Of a page that nothing was read of."""
    if not part.piece.seen:
        return part.holding.notes[-1] if part.holding.notes else "Its numbers cannot be read."
    if _first_values(part.piece) is None:
        return "The values of the first block are not in it: pages are read from these."
    return "The values of its first block are of no tokens of this model."


def _place(seen: Seen) -> str:
    observation = seen.observation
    what = {"residual": "states", "final": "states"}.get(observation.place, observation.place)
    stored = f", kept as {observation.stored}" if observation.stored else ""
    positions = "" if observation.positions == "all" else f", {observation.positions} position"
    return f"{what} of layer {seen.layer}{stored}{positions}"


def _proof(one: Inversion, known: Sequence[tuple[int, ...]]) -> str:
    """How it is known that these are the ids."""
    said = {
        "recovered": "A pass over these ids gives these states, and nothing else fits.",
        "ambiguous": f"A pass over these ids gives these states; {one.fitting} prompts fit.",
        "likely": one.reason or "Every token is the nearest by evidence.",
        "not_recovered": one.reason,
    }[one.status]
    if known:
        same = any(tuple(one.reading.token_ids) == ids for ids in known)
        said += " They are the ids that stand in the clear." if same else " Other ids stand in the clear."
    return said


def _pages(count: int) -> str:
    return "1 page" if count == 1 else f"{count} pages"


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
