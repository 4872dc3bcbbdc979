"""``preimage.measure_leak``: how much of a set of prompts each exposure gives away, layer by layer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from preimage.devices import by_device
from preimage.errors import OptionError, PromptError, StatesError
from preimage.inversion import Inversion, invert, remember_first_states
from preimage.layers import Layer, LayerSpec, parse_layers
from preimage.leak.exposures import Exposure
from preimage.leak.margins import measure_margins
from preimage.leak.options import LeakChanges, LeakOptions
from preimage.leak.result import SURE, LeakAudit, LeakCell, PromptRead, Utility
from preimage.leak.utility import filled, guessed, measure_utility
from preimage.models import LanguageModel, require_model
from preimage.observations import Observation
from preimage.progress import Listener, Progress, reporting, silent
from preimage.prompts import PromptSet
from preimage.states import States, capture, encode_all
from preimage.storage import Place, Run

_LOT = {"cpu": 1, "cuda": 25}  # prompts begun together: after each lot the clock is looked at
_GLANCE = 0.05  # seconds a prompt may take in any case: what is proposed is read then
_GLANCES = 1 / 3  # of a cell's time is for looks at prompts that there is no time to read to the end
_FEW = 10  # prompts are looked at in any case
_ONE_SECRET = 10.0  # seconds in any case for a secret that all prompts share, which is found out once
_SAMPLES = 20
_PAYS = 128  # prompts times cells from which a pass over the whole vocabulary saves more than it costs


def default_layers(n_layers: int) -> tuple[Layer, ...]:
    """The first, those at a quarter, half and three quarters, the last, and what leaves the last norm."""
    at = (max(1, round(n_layers * quarter / 4)) for quarter in (0, 1, 2, 3, 4))
    return (*dict.fromkeys(at), "final")


def measure_leak(
    model: LanguageModel,
    prompts: Sequence[str | Sequence[int]] | PromptSet,
    layers: LayerSpec | None = None,
    *,
    options: LeakOptions | None = None,
    bos: bool | None = None,
    out: str | Path | Place | None = None,
    progress: Listener = silent,
    **changes: Unpack[LeakChanges],
) -> LeakAudit:
    """Run prompts, expose their states in every way that was asked for, and read them back.

    ``prompts``: texts or token ids. ``layers``: by default the first, a quarter, half, three quarters, the
    last, and ``final``. ``options`` or single fields of it: see :class:`LeakOptions`. An exposure that a
    layer does not have (keys of ``final``) is left out. The attacker has the model, knows how states were
    changed and not the secrets of it, and uses the strongest inverter there is: :func:`preimage.invert`. With
    ``out`` every cell is kept in that run folder as it ends, and calling again continues it.

    Cost: from one forward pass a prompt and cell (states as they are) to some tens (noise, few bits, caches).

    >>> import preimage
    >>> model = preimage.models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> audit = preimage.measure_leak(model, [[7, 3, 9], [4, 4]], [1], exposures=("float32", "int8"))
    >>> audit.at("float32", 1).exact, audit.at("float32", 1).verified
    (1.0, 1.0)
    """
    require_model(model)
    chosen = replace(options or LeakOptions(), **changes)
    wanted = default_layers(model.n_layers) if layers is None else parse_layers(layers, model.n_layers)
    ids = encode_all(model, prompts, bos)
    if len(ids) < 1:
        raise PromptError("No prompt was given.", "Give at least one.")
    source = prompts if isinstance(prompts, PromptSet) else PromptSet((), "list", chosen.seed, 0)
    source = replace(source, ids=tuple(ids))
    cells = {
        f"{exposure.spec}@{layer}": (exposure, layer)
        for layer in wanted
        for exposure in chosen.parsed
        if _has(exposure, layer)
    }
    if not cells:
        raise OptionError(
            "These layers have none of these exposures.", "Keys and values are of blocks, 1..L."
        )
    plan = {
        "command": "leak",
        "model": model.identity.to_dict(),
        "prompts": source.fingerprint,
        "layers": list(wanted),
        "options": chosen.to_dict(),
    }
    run = Run(plan, out, name_command=False)
    with model.unchanging(), reporting(progress) as report:
        work = _Audit(model, ids, wanted, chosen, report, len(cells))
        found, margins, baseline = _measured(run, work, cells, wanted if chosen.margins else (), report)
    lengths = tuple(map(len, ids))
    result = LeakAudit(
        model=model.identity.to_dict(),
        prompts=len(ids),
        lengths=(min(lengths), max(lengths)),
        source=source.source,
        fingerprint=source.fingerprint,
        options=chosen.to_dict(),
        cells=tuple(found[key] for key in cells),
        baseline=baseline,
        margins=margins,
        samples=tuple(model.decode(one) or " ".join(map(str, one)) for one in ids[:_SAMPLES]),
    )
    run.finish(result.to_dict, {"cells": lambda: result.rows})
    return result


def _measured(
    run: Run,
    work: _Audit,
    cells: dict[str, tuple[Exposure, Layer]],
    margins_at: tuple[Layer, ...],
    progress: Progress,
) -> tuple[dict[str, LeakCell], dict[Layer, tuple[float, ...]], float]:
    """Every cell, the margins of these layers and the baseline: kept, or measured now."""
    order = sorted(cells, key=lambda key: cells[key][0].noise)  # what is quick leaves its time to the rest
    work.prepare([cells[key] for key in run.left(order)])
    found = run.each(
        order, LeakCell, lambda keys: [work.cell(*cells[key]) for key in keys], progress, "cells read"
    )
    names = {f"margins@{layer}": layer for layer in margins_at}
    measured = run.each(
        list(names), dict, lambda keys: [work.margins(names[key]) for key in keys], progress,
        "layers whose margins were measured",
    )  # fmt: skip
    guess = run.each(["baseline"], dict, lambda _: [work.baseline()], progress, "baseline")["baseline"]
    share = math.nan if guess["share"] is None else float(guess["share"])
    return found, {layer: tuple(measured[name]["margins"]) for name, layer in names.items()}, share


def _has(exposure: Exposure, layer: Layer) -> bool:
    """Whether a layer has what is exposed: caches, attention and MLPs are of blocks."""
    return exposure.seen.place == "residual" or layer not in (0, "final")


class _Audit:
    """The cells of one audit; states are captured when the first cell of their place needs them."""

    def __init__(
        self,
        model: LanguageModel,
        ids: list[tuple[int, ...]],
        layers: tuple[Layer, ...],
        options: LeakOptions,
        progress: Progress,
        total: int,
    ) -> None:
        self._model, self._ids, self._layers, self._options = model, ids, layers, options
        self._progress, self._total, self._done = progress, total, 0
        self._left, self._ends = total, time.perf_counter() + 60 * options.minutes
        self._states: dict[str, States] = {}

    def rows(self, place: str, layer: Layer) -> list[Tensor]:
        """Plain states of all prompts, position x width each."""
        if place not in self._states:
            sites = [one for one in self._layers if place == "residual" or one not in (0, "final")]
            wanted = dict.fromkeys([*sites, "final"] if place == "residual" else sites)
            self._states[place] = capture(self._model, self._ids, list(wanted), observe=place)
        return [self._states[place].at(index, layer) for index in range(len(self._ids))]

    def prepare(self, cells: Sequence[tuple[Exposure, Layer]]) -> None:
        """What all these cells need of the vocabulary, in one pass, where they are many enough to pay."""
        self._left = len(cells)
        self._done = self._total - len(cells)
        read = sum(not one.one_vector and one.spec != "float32" for one, _ in cells)
        if read * len(self._ids) >= _PAYS:
            self._progress(self._done, self._total, "the vocabulary at the first position")
            n_layers = self._model.n_layers
            taps = dict.fromkeys(one.seen.changed(positions="all").tap(at, n_layers) for one, at in cells)
            remember_first_states(self._model, list(taps))

    def cell(self, exposure: Exposure, layer: Layer) -> LeakCell:
        """One exposure at one layer, read prompt by prompt until its share of the time is over."""
        began = time.perf_counter()
        self._share = max(0.0, self._ends - began) / self._left
        plain = self.rows(exposure.seen.place, layer)
        few = exposure.one_vector and len(plain) > self._options.searched
        some = range(self._options.searched if few else len(plain))
        found: dict[int, PromptRead] = {}
        why = f"{len(some)} prompts were searched for" if few else "there was no time for them"
        utility, self._setup = None, 0.0
        for prompts in self._groups(exposure, some):
            seen, told = exposure.of([plain[index] for index in prompts], self._options.seed)
            if utility is None and len(prompts) == len(plain):
                utility = self._utility(exposure, layer, plain, seen, told)
            by_index = dict(zip(prompts, seen, strict=True))
            try:
                self._read_all(found, by_index, layer, exposure, told, began)
            except StatesError as error:  # how coordinates were changed was not found out
                why = f"{error.message} {error.hint}"
        self._done += 1
        self._left -= 1
        return LeakCell(
            exposure=exposure.spec,
            about=exposure.about,
            layer=layer,
            prompts=tuple(one for _, one in sorted(found.items())),
            untried=len(plain) - len(found),
            why=why if len(found) < len(plain) else "",
            setup_seconds=self._setup,
            seconds=time.perf_counter() - began,
            utility=utility,
        )

    def _groups(self, exposure: Exposure, some: range) -> list[list[int]]:
        """Prompts that are changed together: all, or those of one length."""
        if not exposure.equal_lengths:
            return [list(some)]
        by_length: dict[int, list[int]] = {}
        for index in some:
            by_length.setdefault(len(self._ids[index]), []).append(index)
        return list(by_length.values())

    def _read_all(
        self,
        found: dict[int, PromptRead],
        seen: dict[int, Tensor],
        layer: Layer,
        exposure: Exposure,
        told: Observation,
        began: float,
    ) -> None:
        """Read prompts to the end in two thirds of the time, and look at others in the last.

        So shares are of prompts that an attacker took the time for. Where little of it is left a few prompts
        are looked at all the same.
        """
        secret = _is_secret(exposure)  # looked for in all at once
        limited = secret or exposure.one_vector  # which have limits of their own
        size = len(seen) if secret else by_device(_LOT, self._model.device)
        order, glanced = list(seen), False
        for at in range(0, len(order), size):
            lot, left = order[at : at + size], self._share - (time.perf_counter() - began)
            glanced = not limited and (glanced or left <= self._share * _GLANCES)
            if glanced and left <= 0 and at >= _FEW:
                return
            kept = 0.0 if limited else self._share * _GLANCES
            part = left / (len(order) - at) if glanced else (left - kept) / len(lot)
            part = max(part, _ONE_SECRET / len(lot) if secret else _GLANCE)
            found |= self._read(lot, seen, layer, exposure, told, part, glanced=glanced)

    def _read(
        self,
        lot: Sequence[int],
        seen: dict[int, Tensor],
        layer: Layer,
        exposure: Exposure,
        told: Observation,
        part: float,
        *,
        glanced: bool,
    ) -> dict[int, PromptRead]:
        """Some prompts, each in so many seconds; those of one pass or one secret share what they have."""
        shared = len(lot) if _is_secret(exposure) or self._model.device.type != "cpu" else 1
        seconds = self._options.search_seconds if exposure.one_vector else part * shared

        def watch(done: int, total: int, note: str) -> None:
            self._progress(self._done, self._total, f"{exposure.spec}, layer {layer}: {note} {done}/{total}")

        rows = [seen[index] for index in lot]
        results = invert(self._model, rows, layer, observe=told, timeout=seconds, progress=watch)
        self._setup += results[0].setup_seconds
        limit = None if exposure.one_vector else part
        return {
            index: read_of(one, self._ids[index], limit, glanced=glanced)
            for index, one in zip(lot, results, strict=True)
        }

    def _utility(
        self, exposure: Exposure, layer: Layer, plain: list[Tensor], seen: list[Tensor], told: Observation
    ) -> Utility | None:
        if not self._options.utility or not exposure.lossy or exposure.seen.place != "residual":
            return None
        changed = filled(seen, told, plain)
        if changed is None or not self._model.has_head:
            return None
        return measure_utility(self._model, self._ids, layer, plain, changed)

    def margins(self, layer: Layer) -> dict[str, Any]:
        """D at some positions of a layer, relative."""
        rows = self.rows("residual", layer)
        found = measure_margins(self._model, self._ids, layer, rows, self._options.margins)
        return {"margins": list(found)}

    def baseline(self) -> dict[str, Any]:
        """The share of tokens that the model guesses without any state; None where it has no head."""
        if not self._model.has_head:
            return {"share": None}
        return {"share": guessed(self._model, self._ids, self.rows("residual", "final"))}


def _is_secret(exposure: Exposure) -> bool:
    """Whether all prompts were changed in one way that nobody told."""
    return exposure.seen.permuted or exposure.seen.rotated


def read_of(
    found: Inversion, truth: Sequence[int], limit: float | None = None, *, glanced: bool = False
) -> PromptRead:
    """What an inversion gave away, beside the truth. ``limit``: seconds it had; few where ``glanced``."""
    hurried = limit is not None and found.seconds >= limit and found.status == "not_recovered"
    read = found.reading.token_ids
    same = [a == b for a, b in zip(read, truth, strict=False)]
    same += [False] * (max(len(read), len(truth)) - len(same))
    confidence = found.reading.confidence
    sure = [ok for ok, share in zip(same, confidence, strict=False) if share >= SURE]
    return PromptRead(
        status=found.status,
        tokens=len(truth),
        right=sum(same),
        exact=tuple(read) == tuple(truth),
        sure=len(sure),
        sure_right=sum(sure),
        confidence=sum(confidence) / len(confidence) if confidence else 0.0,
        seconds=found.seconds,
        forward_tokens=found.forward_tokens,
        hurried=hurried,
        glanced=glanced or hurried,
    )
