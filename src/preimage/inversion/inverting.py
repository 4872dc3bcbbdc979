"""``preimage.invert``: which prompt made these states?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.errors import LayerError, OptionError
from preimage.inversion.baselines.published import UncachedPrefix
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.last_position import (
    invert_last,
    one_vector_budget,
    prepare_last,
    search_seconds,
)
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.outcomes import make_result, say_how, say_of_last, with_status
from preimage.inversion.engine.policies import GradientPolicy, InterruptedPolicy, Policy, RankedPolicy
from preimage.inversion.engine.proof import prove, search_everywhere
from preimage.inversion.engine.search import Outcome, Search
from preimage.inversion.engine.verifier import FAR, CandidatePrefix, Verifier
from preimage.inversion.options import InvertChanges, InvertOptions
from preimage.inversion.proposers.registry import GRADIENT, build_proposer
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.result import Inversion
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.states import States, noise_of
from preimage.storage import Run

_BATCH_TOKENS = 2**16  # tokens inverted together on a GPU
_PADDING = 1.25  # longest prompt of a batch over its shortest
_GRADIENT = (3, 128)  # gradient proposals come after so many ranked batches, and are so many
_proposers: WeakKeyDictionary[LanguageModel, dict[tuple[object, ...], Proposer]] = WeakKeyDictionary()


def invert(
    model: LanguageModel,
    states: States | Float[Tensor, "*batch position d_model"],
    layer: int | str | None = None,
    *,
    options: InvertOptions | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
    **changes: Unpack[InvertChanges],
) -> list[Inversion]:
    """Recover every prompt from its states at one layer.

    ``states``: captured by ``model``, or a tensor (position x d_model, or prompt x position x d_model);
    ``layer`` may be left out where they hold one layer. ``changes`` are fields of ``options``, such as
    ``method="brute-force"``. One result a prompt, in their order; with ``out``, a run folder, each is kept
    there as it is found, and calling again continues. What is ``recovered`` was verified against the states,
    position by position and as a whole. States of another model or layer are not refused here: they come back
    as ``not_recovered`` (``states.require_made_by(model)`` refuses them at once).

    Cost: about two forward passes over a prompt with a lens; at worst a test of the whole vocabulary at every
    position. The first call for a model and layer also measures noise and builds what proposes.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> states = preimage.capture(model, [[7, 3, 9]], layers=1)
    >>> (result,) = preimage.invert(model, states, proposers="prior")
    >>> result.status, result.token_ids
    ('recovered', (7, 3, 9))
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
    # what is allowed comes from this model on this machine, never from what came with the states
    verifier = Verifier(model, at, noise=noise_of(model, at)[at], tolerance=chosen.tolerance)
    verifier.require_above_noise(states.at(0, at).dtype)
    work = _Inverting(model, states, verifier, chosen)
    states.require_finite(at)  # before any work is done
    plan = {
        "command": "invert",
        "model": model.identity.to_dict(),
        "states": states.fingerprint(at),
        "layer": at,
        "options": chosen.to_dict(),
        "far": FAR,  # results judged by another line, or by none, do not mix
    }
    run = Run(plan, out)
    results = run.kept(range(len(states)), Inversion)
    batches = work.batches(run.left(range(len(states))))
    setup = time.perf_counter() - began

    def invert_batch(indices: tuple[int, ...]) -> None:
        for index, result in zip(indices, work.invert(indices, progress), strict=True):
            results[index] = replace(result, setup_seconds=setup)
            run.keep(index, results[index])

    run.each(batches, invert_batch, progress, "batches of prompts inverted")
    in_order = [results[index] for index in range(len(states))]
    run.finish(lambda: [result.to_dict() for result in in_order])
    return in_order


def _choose_layer(states: States, layer: int | str | None, n_layers: int) -> Layer:
    if layer is not None:
        return parse_layer(layer, n_layers)
    if len(states.layers) == 1:
        return states.layers[0]
    kept = ", ".join(map(str, states.layers))
    raise LayerError(f"These states hold {len(states.layers)} layers.", f"Choose one of {kept}.")


class _Inverting:
    """How the prompts of one call are inverted: in shared passes by the fast engine, or one by one."""

    def __init__(
        self, model: LanguageModel, states: States, verifier: Verifier, options: InvertOptions
    ) -> None:
        self._model, self._states, self._verifier, self._options = model, states, verifier, options
        self._engine: FastInverter | None = None
        self._proposer = ""

    def batches(self, indices: list[int]) -> list[tuple[int, ...]]:
        """Make ready for these prompts; which of them go together.

        Many of about one length where a GPU has room for them, else each alone.
        """
        lengths = self._states.lengths
        if self._options.method == "fast" and self._states.positions == "all" and indices:
            proposer = _proposer(self._model, self._verifier.layer, self._options.chosen_proposers)
            self._proposer = proposer.name
            self._engine = FastInverter(self._model, self._verifier, proposer, self._repair_policy)
            self._engine.prepare(max(lengths[index] for index in indices))
        if self._states.positions == "last" and indices:
            prepare_last(self._model, self._verifier)
        if self._engine is None or self._model.device.type == "cpu":
            return [(index,) for index in indices]
        batches: list[list[int]] = []
        for index in sorted(indices, key=lengths.__getitem__):
            length = lengths[index]
            latest = batches[-1] if batches else []
            alike = latest and length <= _PADDING * lengths[latest[0]]
            if alike and (len(latest) + 1) * length <= _BATCH_TOKENS:
                latest.append(index)
            else:
                batches.append([index])
        return [tuple(batch) for batch in batches]

    def invert(self, indices: tuple[int, ...], progress: Progress) -> Iterator[Inversion]:
        """The results of one batch, one after another."""
        observed = [self._states.at(index, self._verifier.layer) for index in indices]
        before = self._model.forward_tokens
        budgets = [self._budget(len(one)) for one in observed]
        clock = budgets[0]
        if self._engine is not None:
            outcomes = self._engine.run(observed, budgets)
        elif self._states.positions == "last":
            limit = search_seconds(self._options.max_tests, self._options.timeout)
            outcomes = [
                invert_last(self._model, observed[0], self._verifier, clock, seconds=limit, progress=progress)
            ]
        else:
            outcomes = [self._search(observed[0], budgets[0], indices[0])]
        # time and tokens are divided evenly between prompts that shared passes
        ran = (self._model.forward_tokens - before) // len(indices)
        seconds = clock.seconds / len(indices)
        for one, outcome, budget in zip(observed, outcomes, budgets, strict=True):
            result = make_result(
                self._model, outcome, self._verifier, self._options, budget.tests, seconds, ran
            )
            result = replace(result, proposer=self._proposer)
            if self._states.positions == "last":
                result = say_of_last(result, outcome.tried)
            yield self._proved(result, one, progress) if self._options.prove else result

    def _budget(self, length: int) -> Budget:
        if self._states.positions == "last":
            return one_vector_budget(self._options.max_tests, self._options.timeout)
        bound = length * self._model.vocab_size
        return Budget(min(self._options.max_tests or bound, bound), self._options.timeout)

    def _repair_policy(self, prefix: CandidatePrefix, observed: Tensor, ranked: Policy) -> Policy:
        """The proposer's order, with SIPIT's gradient in it where that was asked for."""
        if GRADIENT not in self._options.chosen_proposers:
            return ranked
        generator = torch.Generator().manual_seed(self._options.seed)
        observe = self._verifier.observe
        descent = GradientPolicy(self._model, prefix, observed, observe, self._options, generator)
        return InterruptedPolicy(ranked, descent, *_GRADIENT)

    def _search(self, observed: Float[Tensor, "position d"], budget: Budget, index: int) -> Outcome:
        """SIPIT or brute force, position by position."""
        model, verifier, options = self._model, self._verifier, self._options
        prefix: CandidatePrefix = model.prefix(verifier.layer)
        if options.published_cost:
            prefix = UncachedPrefix(model, verifier.layer)
        generator = torch.Generator().manual_seed(options.seed + index)

        def policy(position: int) -> Policy:
            if options.method == "brute-force":
                order = torch.randperm(model.vocab_size, generator=generator)
                return RankedPolicy(order, prefix.max_candidates, prefix.max_candidates)
            return GradientPolicy(model, prefix, observed[position], verifier.observe, options, generator)

        target = verifier.target(observed)
        return Search(target, prefix, verifier, policy, lookalikes_of(model), budget).run()

    def _proved(self, result: Inversion, observed: Tensor, progress: Progress) -> Inversion:
        """The result with its proof; one that finds another token within reach lets a search decide anew."""
        model, verifier = self._model, self._verifier
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
        outcome = search_everywhere(model, proved, target, verifier, self._options.timeout)
        open_ = replace(proved, reason=outcome.reason, unique=None, uniqueness="")
        return with_status(open_, outcome, model.vocab_size)


def _proposer(model: LanguageModel, layer: Layer, chosen: Sequence[str | Proposer]) -> Proposer:
    """The proposer of a layer; of names alone, it is built once for a model in memory."""
    names = tuple(one for one in chosen if isinstance(one, str) and one != GRADIENT)
    if any(not isinstance(one, str) for one in chosen):
        return build_proposer(model, layer, chosen)
    known = _proposers.setdefault(model, {})
    if (layer, names) not in known:
        known[layer, names] = build_proposer(model, layer, names)
    return known[layer, names]
