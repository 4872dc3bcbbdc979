"""What readings ask of a model, and how it is answered: one prompt on a cached prefix, many in shared passes.

A reading of one prompt is a generator: it yields what it wants to know, and is sent the answer. On a CPU one
reading is driven at a time, on the keys and values its passes leave behind. On a GPU, where a pass over few
tokens costs as much as one over many, all readings are driven together, and what they ask at the same time
is answered in the same passes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.devices import by_device
from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.expectation import Expectation, next_token, shared_tokens
from preimage.inversion.engine.tangent import tangent_order
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.models import LanguageModel, states_of_branches

_BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}  # of one pass
_PADDING = 1.5  # the longest of a shared pass over its shortest
_BRANCHES = 2048  # of one prompt in one pass that is shared

States: TypeAlias = Float[Tensor, "_ d"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Branches:
    """States of a prompt from a position on, and of other tokens at positions of it or at its end.

    Answered by both: those of ``ids[start:]``, and one a branch.
    """

    ids: Int[Tensor, " position"]
    start: int
    places: Int[Tensor, " branch"]
    tokens: Int[Tensor, " branch"]


@dataclass(frozen=True)
class Rows:
    """States of equally long prompts. Answered by all of them, row by position."""

    rows: Int[Tensor, "row position"]


@dataclass(frozen=True)
class Expected:
    """Log probabilities of every next token behind a prompt; None where nothing is expected."""

    ids: Int[Tensor, " position"]


@dataclass(frozen=True)
class Tangent:
    """Every token behind a prompt as seen from one that does not fit; None where there is no gradient."""

    ids: Int[Tensor, " position"]
    token: int
    target: Target


Question: TypeAlias = Branches | Rows | Expected | Tangent
Asking: TypeAlias = Generator[Question, Any, Result]


class Answers:
    """Answers what readings ask, at one place of a model."""

    def __init__(self, model: LanguageModel, verifier: Verifier, apart: Apartness) -> None:
        self._model, self._verifier, self._tap, self._apart = model, verifier, verifier.tap, apart
        self.together = model.device.type != "cpu"

    def drive(self, readings: Sequence[Asking[Result]]) -> list[Result]:
        """Run readings to their end; what each returns."""
        if self.together:
            return self._drive(readings)
        return [result for one in readings for result in self._drive([one])]

    def _drive(self, readings: Sequence[Asking[Result]]) -> list[Result]:
        results: dict[int, Result] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(readings)))
        self._prefix = self._model.prefix(self._tap)
        self._held: list[int] = []
        self._expectation = Expectation(self._model)
        while answers:
            asked: dict[int, Question] = {}
            for index, answer in answers.items():
                try:
                    asked[index] = readings[index].send(answer)
                except StopIteration as end:
                    results[index] = end.value
            answers = self._answer(asked)
        return [results[index] for index in range(len(readings))]

    def _answer(self, asked: dict[int, Question]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        branches = {index: one for index, one in asked.items() if isinstance(one, Branches)}
        if self.together and branches:
            answers |= self._share_branches(branches)
        for index, question in asked.items():
            if isinstance(question, Rows):
                size = max(1, by_device(_BATCH_TOKENS, self._model.device) // question.rows.shape[1])
                parts = [self._states(part) for part in question.rows.split(size)]
                answers[index] = torch.cat(parts)
            elif index not in answers and isinstance(question, Branches):
                answers[index] = self._branch_cached(question)
            elif isinstance(question, Tangent):
                none = torch.empty(0, dtype=torch.long)
                self._branch_cached(Branches(question.ids, len(question.ids), none, none))
                answers[index] = tangent_order(
                    self._model, self._prefix, self._verifier, question.target, question.token
                )
        expected = {index: one.ids for index, one in asked.items() if isinstance(one, Expected)}
        return answers | self._expect(expected)

    def _states(self, rows: Int[Tensor, "row position"]) -> Float[Tensor, "row position d"]:
        return self._model.states(rows, (self._tap,))[self._tap]

    # One prompt, on a cached prefix.

    def _branch_cached(self, asked: Branches) -> tuple[States, States]:
        ids, places, tokens = asked.ids, asked.places, asked.tokens
        start = min(asked.start, shared_tokens(ids.tolist(), self._held))
        self._prefix.crop(start)
        self._held = ids.tolist()
        inside = len(places) and bool((places < len(ids)).any())
        if inside and self._apart.takes_branches(len(ids)):
            states, others = self._prefix.extend_and_try(ids[start:], places, tokens)
            return states[asked.start - start :], others
        none = torch.empty(0, self._model.width(self._tap), device=self._model.device)
        states = self._prefix.extend(ids[start:]) if start < len(ids) else none
        others = none
        for place in places.unique().flip(0).tolist():  # on a prefix that grows shorter
            self._prefix.crop(place)
            mine = (places == place).nonzero().flatten()
            seen = torch.cat(
                [self._prefix.try_tokens(part) for part in tokens[mine].split(self._prefix.max_candidates)]
            )
            others = others if len(others) else seen.new_empty(len(tokens), seen.shape[-1])
            others[mine.to(seen.device)] = seen
        self._held = self._held[: len(self._prefix)]
        return states[asked.start - start :], others

    # Many prompts in shared passes.

    def _share_branches(self, asked: dict[int, Branches]) -> dict[int, tuple[States, States]]:
        longest = max(len(one.ids) for one in asked.values())
        if not self._apart.takes_branches(longest):
            return {}
        most = by_device(_BATCH_TOKENS, self._model.device)
        order = sorted(asked, key=lambda index: (len(asked[index].tokens), len(asked[index].ids)))
        answers: dict[int, tuple[States, States]] = {}
        batch: list[int] = []
        for index in order:
            if len(asked[index].tokens) > _BRANCHES:
                continue
            size = longest + len(asked[index].tokens)
            smallest = longest + len(asked[batch[0]].tokens) if batch else size
            if batch and ((len(batch) + 1) * size > most or size > _PADDING * smallest):
                answers |= self._run_shared({one: asked[one] for one in batch})
                batch = []
            batch.append(index)
        return answers | self._run_shared({one: asked[one] for one in batch}) if batch else answers

    def _run_shared(self, asked: dict[int, Branches]) -> dict[int, tuple[States, States]]:
        ids, places, tokens = (
            pad_sequence(list(column), batch_first=True)
            for column in zip(*((one.ids, one.places, one.tokens) for one in asked.values()), strict=True)
        )
        trunks, others = states_of_branches(self._model, self._tap, ids, places, tokens)
        return {
            index: (trunk[one.start : len(one.ids)], other[: len(one.tokens)])
            for (index, one), trunk, other in zip(asked.items(), trunks, others, strict=True)
        }

    def _expect(self, asked: dict[int, Int[Tensor, " position"]]) -> dict[int, Tensor | None]:
        table = self._model.unembedding
        some = {index: ids for index, ids in asked.items() if len(ids)}
        if len(some) < 2 or table is None:
            return {index: self._expectation.behind(ids.tolist()) for index, ids in asked.items()}
        answers: dict[int, Tensor | None] = dict.fromkeys(asked)
        rows = pad_sequence(list(some.values()), batch_first=True)
        states = self._model.states(rows, ("final",))["final"]
        for index, ids, row in zip(some, some.values(), states, strict=True):
            answers[index] = next_token(table, row[len(ids) - 1])
        return answers
