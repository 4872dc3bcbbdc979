"""Reads prompts that reproduce no states exactly; on a GPU, many of them in shared passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.asking import Answers, Asking, Result
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.evidence import Read
from preimage.inversion.engine.first_look import FirstLook
from preimage.inversion.engine.reading import PromptReading
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.standard import Proposer
from preimage.models import LanguageModel


class Begun(NamedTuple):
    """A prompt being read."""

    reading: PromptReading
    budget: Budget
    known: list[int]


class Reader:
    """Reads prompts at one place of a model."""

    def __init__(self, model: LanguageModel, verifier: Verifier, proposer: Proposer, known: int = 0) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._known = known  # first positions that were not observed: their tokens are known
        self._answers = Answers(model, verifier, Apartness(model, verifier))

    def begin(
        self,
        observed: Float[Tensor, "position d"],
        budget: Budget,
        known: Sequence[int],
        fitting: Sequence[int] = (),
    ) -> Begun:
        """Begin to read a prompt behind some known tokens.

        ``fitting``: first tokens that were found to fit, where others may too: they are proposed.
        """
        observed = observed.to(self._model.device)
        target = self._verifier.target(observed[self._known :])
        if self._known:
            target = self._verifier.behind(observed[: self._known], target)
        reading = PromptReading(self._model, self._verifier, self._proposer, observed, target, fitting)
        return Begun(reading, budget, list(known))

    def look(self, begun: Sequence[Begun]) -> list[FirstLook]:
        """A first look at each, which comes before reading it."""
        return self._drive([one.reading.look(one.budget, one.known) for one in begun])

    def read(self, begun: Sequence[Begun]) -> list[Read]:
        """The likeliest prompts; what a budget leaves unread is proposed."""
        return self._drive([one.reading.run(one.budget, one.known) for one in begun])

    def _drive(self, asking: Sequence[Asking[Result]]) -> list[Result]:
        with torch.inference_mode():
            return self._answers.drive(asking)
