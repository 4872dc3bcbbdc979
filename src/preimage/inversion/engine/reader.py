"""Reads prompts that reproduce no states exactly; on a GPU, many of them in shared passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.asking import Answers, Asking
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.evidence import Read
from preimage.inversion.engine.reading import PromptReading
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.standard import Proposer
from preimage.models import LanguageModel


class Reader:
    """Reads prompts at one place of a model."""

    def __init__(self, model: LanguageModel, verifier: Verifier, proposer: Proposer, known: int = 0) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._known = known  # first positions that were not observed: their tokens are known
        self._answers = Answers(model, verifier, Apartness(model, verifier))

    def read(
        self,
        observed: Sequence[Float[Tensor, "_ d"]],
        budgets: Sequence[Budget],
        known: Sequence[Sequence[int]],
        fitting: Sequence[Sequence[int]] | None = None,
    ) -> list[Read]:
        """The likeliest prompts behind some known tokens each; what a budget leaves unread is proposed.

        ``fitting``: first tokens that were found to fit, where others may too: they are proposed.
        """
        fitting = [()] * len(observed) if fitting is None else fitting
        with torch.inference_mode():
            return self._answers.drive(
                [self._reading(*one) for one in zip(observed, budgets, known, fitting, strict=True)]
            )

    def _reading(
        self, observed: Tensor, budget: Budget, known: Sequence[int], fitting: Sequence[int]
    ) -> Asking[Read]:
        observed = observed.to(self._model.device)
        target = self._verifier.target(observed[self._known :])
        if self._known:
            target = self._verifier.behind(observed[: self._known], target)
        reading = PromptReading(self._model, self._verifier, self._proposer, observed, target, fitting)
        return reading.run(budget, list(known))
