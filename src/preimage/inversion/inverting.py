"""``preimage.invert``: which prompt made these states?"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.errors import LayerError, OptionError
from preimage.inversion.baselines.published import UncachedPrefix
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.fast import FastInverter, RepairPolicy
from preimage.inversion.engine.last_position import invert_last
from preimage.inversion.engine.outcomes import make_result, say_how, say_of_last, with_status
from preimage.inversion.engine.policies import GradientPolicy, InterruptedPolicy, Policy, RandomPolicy
from preimage.inversion.engine.proving import prove, search_everywhere
from preimage.inversion.engine.search import Outcome, Search
from preimage.inversion.engine.twins import rivals_of
from preimage.inversion.engine.verifier import FAR, Trial, Verifier
from preimage.inversion.options import InvertOptions
from preimage.inversion.proposers.registry import Proposer, build_proposer
from preimage.inversion.result import Inversion
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.states import States, noise_of
from preimage.storage import Run


def invert(
    model: LanguageModel,
    states: States | Float[Tensor, "*batch position d_model"],
    layer: int | str | None = None,
    *,
    options: InvertOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Any,
) -> list[Inversion]:
    """Recover every prompt from its states at one layer.

    ``changes`` are fields of :class:`InvertOptions`, e.g. ``method="brute-force"``. A prompt is searched
    position by position; what is returned as ``recovered`` was verified against the states, position by
    position and as a whole. With ``out`` each result is kept in that run folder as it is found, and calling
    again continues it. States of another model or layer are not refused here: they come back as
    ``not_recovered`` (``states.require_made_by(model)`` refuses them at once).
    """
    began = time.perf_counter()
    chosen = replace(options or InvertOptions(), **changes)
    if isinstance(states, Tensor):
        if layer is None:
            raise LayerError("A bare tensor does not say its layer.", "Give layer=.")
        states = States.from_tensor(states, parse_layer(layer, model.n_layers))
    at = _choose_layer(states, layer, model.n_layers)
    if chosen.prove and states.positions != "all":
        raise OptionError("These states keep the last position alone.", "Prove states of every position.")
    states.require_width(model)
    verifier = _verifier(model, states, at, chosen)
    states.require_finite(at)  # before any work is done
    run = Run(_plan(model, states, at, chosen), out)
    results = {int(key): Inversion.from_dict(item) for key, item in run.items.items()}
    open_ = run.left(range(len(states)))
    engine, proposer = None, ""
    if chosen.method == "fast" and states.positions == "all" and open_:
        reading = _proposer(model, at, chosen.wanted)
        engine, proposer = (
            FastInverter(model, verifier, reading, _repair_policy(model, verifier, chosen)),
            reading.name,
        )
        engine.prepare(max(states.lengths[index] for index in open_))
    setup = time.perf_counter() - began

    def invert_some(indices: tuple[int, ...]) -> None:
        found = (
            _invert_together(model, states, indices, verifier, chosen, engine)
            if engine is not None
            else [_invert_one(model, states, indices[0], verifier, chosen)]
        )
        for index, result in zip(indices, found, strict=True):
            result = replace(result, proposer=proposer, setup_seconds=setup)
            if chosen.prove:
                result = _proved(model, result, states.at(index, at), verifier, chosen, progress)
            run.keep(index, result)
            results[index] = result

    batches = _batches(states, open_, engine is not None, model)
    run.each(batches, invert_some, progress, "batches of prompts inverted")
    found = [results[index] for index in range(len(states))]
    run.finish(lambda: [result.to_dict() for result in found])
    return found


def _batches(states: States, open_: list[int], together: bool, model: LanguageModel) -> list[tuple[int, ...]]:
    """Which prompts go together: many of about one length where a GPU has room for them, else one by one."""
    if not together or model.device.type == "cpu":
        return [(index,) for index in open_]
    batches: list[list[int]] = []
    lengths = states.lengths
    for index in sorted(open_, key=lengths.__getitem__):
        length = lengths[index]
        latest = batches[-1] if batches else []
        alike = latest and length <= _PADDING * lengths[latest[0]]
        if alike and (len(latest) + 1) * length <= _BATCH_TOKENS:
            latest.append(index)
        else:
            batches.append([index])
    return [tuple(batch) for batch in batches]


def _plan(model: LanguageModel, states: States, layer: Layer, options: InvertOptions) -> dict[str, Any]:
    return {
        "command": "invert",
        "model": model.identity.to_dict(),
        "states": states.fingerprint(layer),
        "layer": layer,
        "options": options.to_dict(),
        "far": FAR,  # results judged by another line, or by none, do not mix
    }


def _choose_layer(states: States, layer: int | str | None, n_layers: int) -> Layer:
    if layer is not None:
        return parse_layer(layer, n_layers)
    if len(states.layers) == 1:
        return states.layers[0]
    kept = ", ".join(map(str, states.layers))
    raise LayerError(f"These states hold {len(states.layers)} layers.", f"Choose one of {kept}.")


def _verifier(model: LanguageModel, states: States, layer: Layer, options: InvertOptions) -> Verifier:
    """What is allowed comes from this model on this machine, never from what came with the states."""
    verifier = Verifier(model, layer, noise=noise_of(model, (layer,))[layer], tolerance=options.tolerance)
    verifier.require_above_noise(states.at(0, layer).dtype)
    return verifier


_BATCH_TOKENS = 2**16  # tokens inverted together on a GPU
_PADDING = 1.25  # longest prompt of a batch over its shortest
_GRADIENT = (3, 128)  # gradient proposals come after so many ranked batches, and are so many
_proposers: weakref.WeakKeyDictionary[LanguageModel, dict[tuple[object, ...], Proposer]]
_proposers = weakref.WeakKeyDictionary()


def _proposer(model: LanguageModel, layer: Layer, wanted: tuple[str, ...]) -> Proposer:
    """The proposer of a layer, built once for a model in memory."""
    known = _proposers.setdefault(model, {})
    reading = tuple(name for name in wanted if name != "gradient")
    if (layer, reading) not in known:
        known[layer, reading] = build_proposer(model, layer, reading)
    return known[layer, reading]


def _repair_policy(model: LanguageModel, verifier: Verifier, options: InvertOptions) -> RepairPolicy:
    """The proposer's order, with SIPIT's gradient in it where that was asked for."""

    def policy(prefix: Trial, observed: Tensor, ranked: Policy) -> Policy:
        if "gradient" not in options.wanted:
            return ranked
        generator = torch.Generator().manual_seed(options.seed)
        descent = GradientPolicy(model, prefix, observed, verifier.observe, options, generator)
        return InterruptedPolicy(ranked, descent, *_GRADIENT)

    return policy


def _invert_one(
    model: LanguageModel, states: States, index: int, verifier: Verifier, options: InvertOptions
) -> Inversion:
    observed = states.finite_at(index, verifier.layer)
    run_before = model.forward_tokens
    budget = _budget(model, len(observed), options)
    if states.positions == "last":
        outcome = invert_last(model, observed, verifier, budget)
    else:
        outcome = _search(model, observed, verifier, options, budget, index)
    ran = model.forward_tokens - run_before
    result = make_result(model, outcome, verifier, options, budget.tests, budget.seconds, ran)
    return result if states.positions == "all" else say_of_last(result)


def _proved(
    model: LanguageModel,
    result: Inversion,
    observed: Tensor,
    verifier: Verifier,
    options: InvertOptions,
    progress: Progress,
) -> Inversion:
    """The result with its proof; a proof that finds another token within reach lets a search decide anew."""
    target = verifier.target(observed)
    proved, holds = prove(model, result, target, verifier, progress)
    if result.fitting == 0:
        return proved
    if holds:
        listed = max(1, len(result.alternatives))
        proved = replace(proved, complete=result.fitting == listed, reason="")
        if result.fitting > 1:  # twins
            return proved
        return say_how(replace(proved, status="recovered", alternatives=()), model.vocab_size)
    outcome = search_everywhere(model, proved, target, verifier, options.timeout)
    open_ = replace(proved, reason=outcome.reason, unique=None, uniqueness="")
    return with_status(open_, outcome, model.vocab_size)


def _budget(model: LanguageModel, length: int, options: InvertOptions) -> Budget:
    bound = length * model.vocab_size
    return Budget(min(options.max_tests or bound, bound), options.timeout)


def _invert_together(
    model: LanguageModel,
    states: States,
    indices: tuple[int, ...],
    verifier: Verifier,
    options: InvertOptions,
    engine: FastInverter,
) -> list[Inversion]:
    """Prompts in shared passes; time and tokens are divided evenly between them."""
    observed = [states.at(index, verifier.layer) for index in indices]
    run_before = model.forward_tokens
    budgets = [_budget(model, len(one), options) for one in observed]
    clock = budgets[0]
    outcomes = engine.run(observed, budgets)
    ran, seconds = (model.forward_tokens - run_before) // len(indices), clock.seconds / len(indices)
    return [
        make_result(model, outcome, verifier, options, budget.tests, seconds, ran)
        for outcome, budget in zip(outcomes, budgets, strict=True)
    ]


def _search(
    model: LanguageModel,
    observed: Tensor,
    verifier: Verifier,
    options: InvertOptions,
    budget: Budget,
    index: int,
) -> Outcome:
    prefix: Trial = model.prefix(verifier.layer)
    if options.published_cost:
        prefix = UncachedPrefix(model, verifier.layer)
    generator = torch.Generator().manual_seed(options.seed + index)

    def policy(position: int) -> Policy:
        if options.method == "brute-force":
            return RandomPolicy(model.vocab_size, prefix.max_candidates, generator)
        return GradientPolicy(model, prefix, observed[position], verifier.observe, options, generator)

    target = verifier.target(observed)
    return Search(target, prefix, verifier, policy, rivals_of(model), budget).run()
