"""How the prompts of one call are inverted: in shared passes by the fast engine, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.baselines.confirming import confirmed
from preimage.inversion.baselines.hard_prompts import Guess, optimised
from preimage.inversion.baselines.published import UncachedPrefix
from preimage.inversion.baselines.readouts import logit_lens, nearest_embedding
from preimage.inversion.baselines.vocabulary_match import matched
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.deciding import Evidence
from preimage.inversion.engine.fast import FastInverter
from preimage.inversion.engine.first_states import first_states
from preimage.inversion.engine.gaps import FEW_PAIRS, Gaps
from preimage.inversion.engine.judgement import begins_oddly
from preimage.inversion.engine.last_position import (
    invert_last,
    one_vector_budget,
    prepare_last,
    search_seconds,
)
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.outcomes import (
    FILLED,
    PUT_BACK,
    as_likely,
    exact_reading,
    make_result,
    say_how,
    say_of_last,
    spelled,
    with_status,
    without_prefix,
)
from preimage.inversion.engine.policies import GradientPolicy, InterruptedPolicy, Policy, RankedPolicy
from preimage.inversion.engine.proof import prove, search_everywhere
from preimage.inversion.engine.search import Outcome, Search
from preimage.inversion.engine.shuffled import invert_shuffled
from preimage.inversion.engine.together import uninterrupted
from preimage.inversion.engine.verifier import CandidatePrefix
from preimage.inversion.options import READERS, InvertOptions
from preimage.inversion.preparing import Prepared, proposer_of
from preimage.inversion.proposers.registry import GRADIENT
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.result import Inversion
from preimage.models import LanguageModel
from preimage.progress import Progress

_BATCH_TOKENS = 2**16  # tokens inverted together on a GPU
_PADDING = 1.25  # longest prompt of a batch over its shortest
_READING = 8  # tests of the whole vocabulary at every position that a reading may cost in all
_GRADIENT = (3, 128)  # gradient proposals come after so many ranked batches, and are so many


class Inverter:
    """How the prompts of one call are inverted: in shared passes by the fast engine, or one by one."""

    def __init__(self, model: LanguageModel, prepared: Prepared, options: InvertOptions) -> None:
        self._model, self._options = model, options
        self._states, self._verifier, self._known, self._found_out = prepared
        states, known, tap = self._states, self._known, self._verifier.tap
        self._observation = states.observation
        self._own = model.states(torch.tensor([known]), (tap,))[tap][0] if known else None
        self._one_vector = states.positions != "all"
        self._engine: FastInverter | None = None
        self._patient: FastInverter | None = None  # which tries the whole vocabulary before it gives up
        self._evidence: Evidence | None = None
        self._proposer = ""
        self.setup_seconds = 0.0
        self._order: tuple[int, ...] = ()  # of rows that came in an unknown one

    def batches(self, indices: list[int]) -> list[tuple[int, ...]]:
        """Make ready for these prompts; which of them go together."""
        lengths = self._states.lengths
        if self._in_shared_passes and indices:
            proposer = self._make_proposer()
            self._proposer = proposer.name
            exact = self._options.prove or self._options.tolerance is not None
            make = partial(FastInverter, self._model, self._verifier, proposer, self._repair_policy)
            self._engine, self._patient = make(hand_on=not exact), make()
            self._engine.prepare(max(lengths[index] for index in indices))
        if self._one_vector and indices:
            prepare_last(self._model, self._verifier, self._states.positions)
        return self.grouped(indices)

    @property
    def _in_shared_passes(self) -> bool:
        every = self._observation.positions == "all" and not self._observation.gaps
        return self._options.method == "fast" and every and self._states.positions == "all"

    @property
    def _reads_by_evidence(self) -> bool:
        """Whether what reproduces no states is read by evidence: else it fits or not, or was read already."""
        seen = self._observation
        return seen.positions != "shuffled" and not seen.gaps and self._options.method not in READERS

    def grouped(self, indices: list[int]) -> list[tuple[int, ...]]:
        """Which prompts go together: many of about one length where a GPU has room, else each alone."""
        lengths = self._states.lengths
        if not self._in_shared_passes or self._model.device.type == "cpu":
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
        padded = self._side_by_side(indices)
        observed = [self._observed(index) for index in indices] if padded is None else list(padded)
        before = self._model.forward_tokens
        budgets = [self._budget(len(one)) for one in observed]
        clock = budgets[0]
        made: dict[int, Inversion] = {}

        def make(index: int, outcome: Outcome) -> None:
            tests = budgets[index].tests
            made[index] = make_result(self._model, outcome, self._verifier, self._options, tests)

        if self._engine is not None:
            with uninterrupted(self._model.device):
                outcomes = self._engine.run(observed, budgets, self._known, padded=padded, ended=make)
        elif self._observation.positions == "shuffled":
            outcomes = [self._reordered(observed[0], budgets[0])]
        elif self._observation.gaps:
            outcomes = [self._filled(observed[0], budgets[0])]
        elif self._one_vector:
            outcomes = [
                invert_last(
                    self._model, observed[0], self._verifier, clock, positions=self._states.positions,
                    seconds=search_seconds(self._options.max_tests, self._options.timeout),
                    progress=progress,
                )
            ]  # fmt: skip
        elif self._options.method in READERS:
            outcomes = [self._read(observed[0], budgets[0], indices[0])]
        else:
            outcomes = [self._search(observed[0], budgets[0], indices[0])]
        for index, outcome in enumerate(outcomes):
            if index not in made:
                make(index, outcome)
        results = [made[index] for index in range(len(outcomes))]
        results = self._shared(results, clock.seconds, before)
        if self._one_vector:
            results = [
                say_of_last(one, outcome.tried) for one, outcome in zip(results, outcomes, strict=True)
            ]
        elif self._reads_by_evidence:
            results = self._by_evidence(results, observed, [outcome.handed_on for outcome in outcomes])
        place = "final" if self._verifier.layer == "final" else self._observation.place
        for one, result in zip(observed, results, strict=True):
            if self._options.prove:
                result = self._proved(result, one, progress)
            exact = result.status in ("recovered", "ambiguous")
            result = replace(
                result,
                proposer=self._proposer,
                observe=place,
                order=self._order,
                reading=spelled(exact_reading(result) if exact else result.reading, self._model),
                setup_seconds=self.setup_seconds,
            )
            if self._found_out:
                result = as_likely(result, PUT_BACK)
            elif self._observation.gaps:
                result = as_likely(result, FILLED)
            yield without_prefix(result, len(self._known), self._model)

    def _shared(self, results: list[Inversion], seconds: float, before: int) -> list[Inversion]:
        """Time and tokens of passes since ``before``, divided evenly between the prompts that shared them."""
        count = max(1, len(results))
        ran = (self._model.forward_tokens - before) // count
        return [
            replace(one, seconds=one.seconds + seconds / count, forward_tokens=one.forward_tokens + ran)
            for one in results
        ]

    def _observed(self, index: int) -> Float[Tensor, "position d"]:
        """The states of a prompt, behind those of the known tokens before it."""
        states = self._states.at(index, self._verifier.layer)
        return states if self._own is None else torch.cat([self._own.to(states), states])

    def _side_by_side(self, indices: Sequence[int]) -> Float[Tensor, "prompt position d"] | None:
        """The states of several prompts of one length in one tensor; None of others."""
        alike = len(indices) > 1 and len({self._states.lengths[index] for index in indices}) == 1
        return self._states.several(indices, self._verifier.layer) if alike and self._own is None else None

    def _by_evidence(
        self, results: list[Inversion], observed: list[Tensor], handed_on: list[bool]
    ) -> list[Inversion]:
        """What prompts are by evidence, where none reproduces their states; at last, the whole search.

        Reading goes on behind what was verified. Where it finds nothing likely and does not know what the
        states are instead, the vocabulary is tried in full.
        """
        open_ = [i for i, one in enumerate(results) if handed_on[i] or one.status == "not_recovered"]
        if not open_:
            return results
        model, before = self._model, self._model.forward_tokens
        some = [results[i] for i in open_]
        budgets = [self._budget(len(observed[i]), results[i]) for i in open_]
        if self._evidence is None:
            self._evidence = Evidence(model, self._verifier, self._make_proposer(), len(self._known))
        settled = [self._known if handed_on[i] else results[i].token_ids for i in open_]
        decided = self._evidence.decide(some, [observed[i] for i in open_], budgets, settled)
        found = []
        for i, budget, (result, explained) in zip(open_, budgets, decided, strict=True):
            if handed_on[i] and result.status == "not_recovered" and not explained:
                result = self._search_patiently(result, observed[i], budget)
            elif handed_on[i] and result.status == "likely" and not self._known and begins_oddly(result):
                result = self._with_exact_first(result, observed[i], budget)
            found.append(replace(result, tests=results[i].tests + budget.tests))
        for i, result in zip(open_, self._shared(found, budgets[0].seconds, before), strict=True):
            results[i] = result
        return results

    def _search_patiently(self, result: Inversion, observed: Tensor, budget: Budget) -> Inversion:
        """What comes of trying the vocabulary in full, beginning with what was read."""
        if self._patient is None:
            return result
        (outcome,) = self._patient.run([observed], [budget], self._known, result.reading.token_ids)
        searched = make_result(self._model, outcome, self._verifier, self._options, 0)
        return replace(
            searched,
            reading=result.reading,
            reason=f"{searched.reason} {result.reason}".strip(),
            seconds=result.seconds,
            forward_tokens=result.forward_tokens,
        )

    def _with_exact_first(self, result: Inversion, observed: Tensor, budget: Budget) -> Inversion:
        """The result with the first token that fits exactly, if there is one, and what comes of it."""
        states = first_states(self._model, self._verifier.tap, patiently=True)
        if states is None:
            return result
        target = self._verifier.target(observed[:1])
        away = target[0].away(self._verifier.observe(states))
        if not float(away.min()) <= target.reaches[0]:
            return result
        ids = (int(away.argmin()), *result.token_ids[1:])
        again = replace(result, reading=result.reading._replace(token_ids=ids), reason="")
        searched = self._search_patiently(again, observed, budget)
        return result if searched.status == "not_recovered" else searched

    def _make_proposer(self) -> Proposer:
        return proposer_of(self._model, self._verifier.tap, self._options, self._verifier.kept)

    def _reordered(self, observed: Tensor, budget: Budget) -> Outcome:
        """Rows in an unknown order: what they came from, and the row of every position."""
        proposer = self._make_proposer()
        self._proposer = proposer.name
        outcome, self._order = invert_shuffled(self._model, observed, self._verifier, proposer, budget)
        return outcome

    def _filled(self, observed: Tensor, budget: Budget) -> Outcome:
        """States of some positions: what they came from, and what stood between them."""
        proposer = self._make_proposer()
        self._proposer = proposer.name
        at = self._observation.at or ()
        return Gaps(self._model, observed, at, self._verifier, proposer, budget).run()

    def _budget(self, length: int, spent: Inversion | None = None) -> Budget:
        """What a prompt may cost, or what is left of it."""
        if self._one_vector:
            return one_vector_budget(self._options.max_tests, self._options.timeout)
        bound, timeout, most = length * self._model.vocab_size, self._options.timeout, self._options.max_tests
        if self._observation.gaps:  # tokens are tried together with the next one
            bound = max(FEW_PAIRS, _READING * (self._observation.at or (0,))[-1] * self._model.vocab_size)
        if spent is None:
            return Budget(min(most or bound, bound), timeout)
        left = _READING * bound if most is None else max(0, most - spent.tests)
        return Budget(left, None if timeout is None else timeout - spent.seconds)

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
        prefix: CandidatePrefix = model.prefix(verifier.tap)
        if options.published_cost:
            prefix = UncachedPrefix(model, verifier.tap)
        generator = torch.Generator().manual_seed(options.seed + index)

        def policy(position: int) -> Policy:
            if options.method == "brute-force":
                order = torch.randperm(model.vocab_size, generator=generator)
                return RankedPolicy(order, prefix.max_candidates, prefix.max_candidates)
            return GradientPolicy(model, prefix, observed[position], verifier.observe, options, generator)

        target = verifier.target(observed)
        return Search(target, prefix, verifier, policy, lookalikes_of(model), budget).run()

    def _read(self, observed: Float[Tensor, "position d"], budget: Budget, index: int) -> Outcome:
        """What a baseline reads, and what verification makes of it."""
        model, verifier, options = self._model, self._verifier, self._options
        target, guess = verifier.target(observed), Guess(())
        if options.method == "hard-prompts":
            generator = torch.Generator().manual_seed(options.seed + index)
            settings = options.hard_prompts
            guess = optimised(model, observed, target, verifier, settings, budget, generator)
        elif options.method == "vocabulary-match":
            guess = matched(model, observed, target, verifier, options.vocabulary_match, budget)
        elif options.method == "nearest-embedding":
            guess = nearest_embedding(model, observed)
        else:
            guess = logit_lens(model, observed, verifier)
        return confirmed(model, guess, target, verifier, self._budget(len(observed)))

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
            how: dict[str, Any] = say_how(proved.positions, model.vocab_size)
            return replace(proved, status="recovered", alternatives=(), **how)
        outcome = search_everywhere(model, proved, target, verifier, self._options.timeout)
        open_ = replace(proved, reason=outcome.reason, unique=None, uniqueness="")
        return with_status(open_, outcome, model.vocab_size)
