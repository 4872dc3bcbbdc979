"""Exact inversion in passes: propose every position, verify in one pass, mend what is wrong, go on.

On a GPU many prompts share a pass (``together``); on a CPU they go one by one, on the keys and values the
last pass left behind (``alone``). The last pass runs over the whole prompt. Beside it, in the same pass, the
token most likely to be mistaken is tried at every position: where that is not far away, a search with the
whole vocabulary decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from preimage.inversion.engine.alone import Alone
from preimage.inversion.engine.apartness import Apartness
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.guessing import Guessing, look_ahead
from preimage.inversion.engine.jobs import Job
from preimage.inversion.engine.repairing import Repairing, RepairPolicy
from preimage.inversion.engine.search import Outcome
from preimage.inversion.engine.together import Together
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.registry import LENS
from preimage.inversion.proposers.standard import Proposer
from preimage.models import LanguageModel
from preimage.progress import settled


class FastInverter:
    """Inverts prompts, together (on a GPU) or one by one; ``repair`` may change the order of candidates."""

    def __init__(
        self,
        model: LanguageModel,
        verifier: Verifier,
        proposer: Proposer,
        repair: RepairPolicy = lambda prefix, observed, ranked: ranked,
        together: bool | None = None,
        *,
        hand_on: bool = False,
    ) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._apart = apart = Apartness(model, verifier)
        guessing = Guessing(model, apart)
        along_tangents = not proposer.name.startswith(LENS)
        repairing = Repairing(model, verifier, apart, repair, hand_on=hand_on, along_tangents=along_tangents)
        self._alone = Alone(verifier, apart, guessing, repairing)
        self._together: Together | None = None
        if together or (together is None and model.device.type != "cpu"):
            self._together = Together(model, verifier, apart, guessing, repairing, self._alone)

    def prepare(self, longest: int) -> None:
        """Find out before the clock of a prompt runs what is asked of the model once."""
        self._apart.takes_branches(longest)

    def run(
        self,
        observed: Sequence[Float[Tensor, "_ d_model"]],
        budgets: Sequence[Budget],
        known: Sequence[int] = (),
        proposal: Sequence[int] = (),
        *,
        padded: Float[Tensor, "prompt position d_model"] | None = None,
        ended: Callable[[int, Outcome], None] = lambda index, outcome: None,
    ) -> list[Outcome]:
        """One outcome a prompt; prompts may differ in length, and all begin with the known tokens.

        ``proposal``: all tokens of the only prompt, where they have been found already. ``padded``: what was
        observed, side by side. ``ended`` is told early of some that end while others run.
        """
        with torch.inference_mode():
            lengths = torch.tensor([len(states) for states in observed], device=self._model.device)
            padded = pad_sequence(list(observed), batch_first=True) if padded is None else padded
            padded = padded.to(self._model.device)
            valid = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
            scores = self._proposer.score(padded, valid)
            own = [one[: len(known)] for one in observed]
            behind = [one[len(known) :] for one in observed] if known else observed
            target = self._verifier.targets(behind, padded[:, len(known) :])
            target = self._verifier.behind(torch.stack(own), target) if known else target
            likely, chances = (side.cpu() for side in scores.likeliest())
            ids = likely[..., 0].clone()
            given = proposal or known
            ids[:, : len(given)] = torch.tensor(given, dtype=ids.dtype)
            make_prefix = partial(self._model.prefix, self._verifier.tap)
            jobs = [
                Job(i, padded[i, :n], target, ids[i, :n], likely[i, :n], chances[i, :n], budget, make_prefix)
                for i, (n, budget) in enumerate(zip(lengths.tolist(), budgets, strict=True))
            ]
            for job in jobs:
                job.known = len(known)
                if proposal:
                    job.chances = torch.ones_like(job.chances[:, :1])
            if not proposal:
                look_ahead(jobs, likely, chances)
            for job in jobs:
                settled(job.ids.tolist, job.known)
            if self._together is not None:
                self._together.run(jobs, target, scores, ended)
            for job in jobs:
                self._alone.run(job, scores)  # what has not ended yet
        return [job.outcome for job in jobs]  # type: ignore[misc]  # every job has ended
