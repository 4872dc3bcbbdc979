"""``preimage.find_collisions``: every pair of a set of prompts, layer by layer; and at several lengths."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

import torch

from preimage.collisions.confirmation import ConfirmedStructure
from preimage.collisions.options import CollisionChanges, CollisionOptions
from preimage.collisions.result import CollisionAudit, ComparedPair, HardKind, LayerCollisions
from preimage.collisions.spacing import RowLabels, measure_spacing, require_above_noise
from preimage.collisions.structure import UNEXPLAINED
from preimage.collisions.tiles import KeptTiles
from preimage.devices import BATCH_TOKENS, by_device
from preimage.distances import here, norms, row_distances
from preimage.errors import OptionError, PromptError, StatesError
from preimage.layers import Layer, LayerSpec, parse_layers
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import HardPair, PromptSet, hard_pairs
from preimage.states import States, capture, encode_all, noise_floor, safety
from preimage.storage import Run, inside

_STATES = "states"  # in the run folder, until the run is done


def find_collisions(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int]] | PromptSet,
    layers: LayerSpec = "all",
    *,
    options: CollisionOptions | None = None,
    bos: bool | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Unpack[CollisionChanges],
) -> CollisionAudit:
    """Compare the last states of all prompts, pair by pair, at every layer, and hard pairs beside them.

    ``prompts``: texts or token ids; those with equal ids count once. ``layers``: 0..L, "final", or a list of
    them. ``options`` or single fields of it: see :class:`CollisionOptions`. ``bos``: whether to put BOS in
    front of texts; by default as the tokenizer does. With ``out`` every layer is kept in that run folder as
    it ends, and calling again continues it. Cost: a pass over all prompts and, for each layer, the certified
    distances of all n (n - 1) / 2 pairs; one layer's last states (n x d_model) are held at a time.

    >>> from preimage.models import new_model
    >>> model = new_model("llama", (8, 1, 2), vocabulary=16, max_length=8, device="cpu")
    >>> audit = find_collisions(model, [[1, 2], [3, 2], [4, 5, 6]], layers=[0, 1], hard_bases=0)
    >>> audit.at(0).spacing.explained, audit.at(1).spacing.within_noise, audit.unexplained
    ({'same last token at layer 0': 1}, 0, 0)
    """
    chosen = replace(options or CollisionOptions(), **changes)
    wanted = parse_layers(layers, model.n_layers)
    given = encode_all(model, prompts, bos)
    source = prompts if isinstance(prompts, PromptSet) else PromptSet((), "list", chosen.seed, 0)
    ids = replace(source, ids=tuple(dict.fromkeys(given)))
    if len(ids) < 2:
        raise PromptError(
            f"{len(given)} prompts, {len(ids)} of them different.", "Give at least two different ones."
        )
    require_above_noise(model, ids.ids, wanted, chosen.thresholds)
    plan = {
        "command": "collisions",
        "model": model.identity.to_dict(),
        "prompts": ids.fingerprint,
        "layers": list(wanted),
        "options": chosen.to_dict(),
        "noise_floors": safety(model.dtype),  # so many are noise; layers judged by another number do not mix
    }
    run = Run(plan, out)
    finished = run.kept(wanted, LayerCollisions)
    audit = _Audit(model, ids, wanted, chosen, run, progress)

    def compare(layer: Layer) -> None:
        finished[layer] = audit.at(layer)

    run.each(wanted, compare)
    lengths = ids.lengths
    result = CollisionAudit(
        model=model.identity.to_dict(),
        prompts=len(ids),
        duplicates_removed=ids.duplicates_removed + len(given) - len(ids),
        lengths=(min(lengths), max(lengths)),
        source=ids.source,
        fingerprint=ids.fingerprint,
        options=chosen.to_dict(),
        layers=tuple(finished[layer] for layer in wanted),
    )
    run.finish(result.to_dict, {"layers": result.rows}, remove=[_STATES])
    return result


def sweep_lengths(
    model: LanguageModel,
    prompts: Mapping[int, PromptSet],
    layers: LayerSpec = "all",
    *,
    options: CollisionOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> dict[int, CollisionAudit]:
    """An audit for each length, over equally many prompts: distances shrink with their number.

    ``prompts``: by their length in tokens. With ``out`` each length has its own run folder there. The rest is
    as in :func:`find_collisions`.
    """
    if len(set(map(len, prompts.values()))) != 1:
        given = ", ".join(f"{len(ids)} at {length}" for length, ids in prompts.items()) or "no"
        raise OptionError(f"The source has {given} prompts.", "Set count to the smallest of these numbers.")
    audits = {}
    for length, ids in prompts.items():
        place = inside(out, f"length-{length}")
        audits[length] = find_collisions(model, ids, layers, options=options, out=place, progress=progress)
    return audits


class _Audit:
    """One search under way; states are captured when the first layer asks for them."""

    def __init__(
        self,
        model: LanguageModel,
        ids: PromptSet,
        layers: Sequence[Layer],
        options: CollisionOptions,
        run: Run,
        progress: Progress,
    ) -> None:
        self._model, self._ids, self._layers, self._options = model, ids, layers, options
        self._run, self._progress = run, progress
        self._done = len(run.done(layers))
        self._noise_floor = noise_floor(model, layers)
        self._hard = _hard_pairs(model, ids, options)
        sides = dict.fromkeys(ids for pair in self._hard for ids in (pair.first, pair.second))
        self._hard_rows = {ids: row for row, ids in enumerate(sides)}
        self._structure = ConfirmedStructure(model, [*ids, *sides], layers)

    def at(self, layer: Layer) -> LayerCollisions:
        """All pairs at one layer."""
        states, hard = self._states
        states.require_finite(layer)
        last = states.last(layer).to(self._model.device)
        ids, structure = self._ids.ids, self._structure
        labels = RowLabels(
            ids=lambda row: ids[row],
            text=lambda row: self._model.decode(ids[row]),
            key=lambda row: structure.key(ids[row], layer),
            explain=lambda a, b, near: structure.explain(ids[a], ids[b], layer, near=near),
        )
        place = self._run.place(f"{_STATES}/tiles-{layer}")
        tiles = None if place is None else KeptTiles(place)
        spacing = measure_spacing(last, self._noise_floor[layer], labels, self._options, tiles or here)
        kinds = () if hard is None else self._hard_kinds(hard, layer)
        result = LayerCollisions(layer, spacing, kinds)
        self._run.keep(layer, result)
        if tiles is not None:
            tiles.forget()
        self._done += 1
        self._progress(self._done, len(self._layers), f"layers compared, {layer} last")
        return result

    @cached_property
    def _states(self) -> tuple[States, States | None]:
        """Of the prompts, and of the hard pairs if there are any."""
        hard = list(self._hard_rows)
        return self._capture(self._ids, "prompts"), self._capture(hard, "hard") if hard else None

    def _capture(self, prompts: PromptSet | list[tuple[int, ...]], name: str) -> States:
        batch, out = by_device(BATCH_TOKENS, self._model.device), self._run.place(f"{_STATES}/{name}")
        return capture(
            self._model, prompts, self._layers, positions="last", batch_tokens=batch, out=out,
            progress=self._progress,
        )  # fmt: skip

    def _hard_kinds(self, states: States, layer: Layer) -> tuple[HardKind, ...]:
        last = states.last(layer)
        for ids, row in self._hard_rows.items():
            if not bool(torch.isfinite(last[row]).all()):
                raise StatesError(
                    f"The hard prompt {reprlib.repr(ids)}, layer {layer}, holds NaN or infinity.",
                    "Set hard_bases to 0, or use float32 if a half-precision model overflowed.",
                )
        rows = [(self._hard_rows[pair.first], self._hard_rows[pair.second]) for pair in self._hard]
        first, second = (last[list(side)] for side in zip(*rows, strict=True))
        radii = safety(first.dtype) * self._noise_floor[layer] * torch.maximum(norms(first), norms(second))
        kinds: dict[str, list[ComparedPair]] = {}
        for pair, ends, distance, radius in zip(
            self._hard, rows, row_distances(first, second).tolist(), radii.tolist(), strict=True
        ):
            both = pair.first, pair.second
            texts = self._model.decode(pair.first), self._model.decode(pair.second)
            reason = self._structure.explain(*both, layer, near=distance <= radius)
            compared = ComparedPair(*ends, *both, *texts, distance, radius, reason)
            kinds.setdefault(pair.kind, []).append(compared)
        return tuple(_summary(kind, pairs) for kind, pairs in kinds.items())


def _summary(kind: str, pairs: list[ComparedPair]) -> HardKind:
    reasons = Counter(pair.explanation for pair in pairs if pair.explanation)
    return HardKind(
        kind=kind,
        pairs=len(pairs),
        closest_pair=min(pairs, key=lambda pair: pair.distance),
        margin=min((p.distance for p in pairs if p.explanation in ("", UNEXPLAINED)), default=None),
        within_noise=sum(pair.distance <= pair.noise_radius for pair in pairs),
        explained={reason: count for reason, count in sorted(reasons.items()) if reason != UNEXPLAINED},
        unexplained=reasons[UNEXPLAINED],
    )


def _hard_pairs(model: LanguageModel, ids: PromptSet, options: CollisionOptions) -> tuple[HardPair, ...]:
    if not options.hard_bases:
        return ()
    begin = getattr(model.tokenizer, "bos_token_id", None)
    everywhere = begin is not None and all(row[0] == begin for row in ids)
    return hard_pairs(
        ids,
        model.tokenizer,
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        bos=begin if everywhere else None,
        seed=options.seed,
        bases=options.hard_bases,
    )
