"""Exact inversion in rounds: propose every position, verify in one pass, repair the first mismatch.

Each round is one plain pass over whole prompts. What it verifies from the left is settled; at the first
mismatch the next candidates are tried, each in a row of its own with the rest of the proposal behind it, so
that a right guess verifies the rest in the same pass. Where these fail too, the position is searched on a
cached prefix, in the proposer's order, up to the whole vocabulary. The round that verifies the last position
is at the same time the check of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.inversion.budget import Budget, BudgetSpentError
from preimage.inversion.proposers import Keys, Proposer
from preimage.inversion.search import Fit, Frame, Outcome, Search
from preimage.inversion.twins import Rivals
from preimage.inversion.verifier import Verifier
from preimage.models import LanguageModel
from preimage.results import Position

# Candidates tried at a mismatch in whole rows, round after round, before the position is searched. A row
# costs a CPU as much as the prompt did; a GPU has room for many, and waits longer for each search.
_LADDER = {"cpu": (2,), "cuda": (2, 16, 64)}
_BATCH_TOKENS = 16384  # tokens of one pass


@dataclass
class Job:
    """One prompt on its way."""

    observed: Float[Tensor, "position d_model"]
    tolerances: Float[Tensor, " position"]
    queries: Float[Tensor, "position rank"]
    ids: Int[Tensor, " position"]  # the proposal; its first ``verified`` tokens are settled
    budget: Budget
    verified: int = 0
    refused: dict[int, dict[int, float]] = field(default_factory=dict)  # position -> token -> distance
    distances: list[float] = field(default_factory=list)
    stage: int = 0  # rounds spent on the first mismatch
    outcome: Outcome | None = None

    def __len__(self) -> int:
        return len(self.ids)


class FastInverter:
    """Inverts prompts of equal length together."""

    def __init__(self, model: LanguageModel, verifier: Verifier, proposer: Proposer) -> None:
        self._model = model
        self._verifier = verifier
        self._proposer = proposer
        self._rivals = Rivals(model)
        self._ladder = _LADDER.get(model.device.type, _LADDER["cpu"])

    def run(
        self, observed: Float[Tensor, "prompt position d_model"], budgets: Sequence[Budget]
    ) -> list[Outcome]:
        """One outcome a prompt."""
        with torch.inference_mode():
            jobs = self._propose(observed, budgets)
            while True:
                variants = {}
                for index, job in enumerate(jobs):
                    if job.outcome is None and (rows := self._advance(job)):
                        variants[index] = rows
                if not variants:
                    break
                self._round(jobs, variants)
        return [job.outcome for job in jobs]  # type: ignore[misc]  # every job has ended

    def _propose(self, observed: Tensor, budgets: Sequence[Budget]) -> list[Job]:
        observed = observed.to(self._model.device)
        queries = self._proposer.queries(observed)
        first = self._proposer.keys(0).best(queries[:, 0])[:, None]
        rest = self._proposer.keys(1).best(queries[:, 1:].flatten(0, 1)).view(len(observed), -1)
        ids = torch.cat([first, rest], dim=1).cpu()
        tolerances = (self._verifier.relative * norms(observed)).cpu()
        return [
            Job(observed[i], tolerances[i], queries[i], ids[i], budget) for i, budget in enumerate(budgets)
        ]

    def _round(self, jobs: list[Job], variants: dict[int, list[Tensor]]) -> None:
        """Run every variant of every open prompt and keep, for each prompt, the one that gets furthest."""
        owners = [index for index, rows in variants.items() for _ in rows]
        rows = torch.stack([row for rows in variants.values() for row in rows])
        layer = self._verifier.layer
        found: dict[int, list[tuple[int, Tensor, Tensor]]] = {index: [] for index in variants}
        size = max(1, _BATCH_TOKENS // rows.shape[1])
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            seen = self._verifier.observe(self._model.states(part, (layer,))[layer])
            targets = torch.stack([jobs[index].observed for index in owners[start : start + size]])
            distances = row_distances(seen, targets).cpu()
            for offset, index in enumerate(owners[start : start + size]):
                reach = _agreeing(distances[offset], jobs[index].tolerances)
                found[index].append((reach, part[offset], distances[offset]))
        for index, rows_found in found.items():
            self._settle(jobs[index], rows_found)

    def _settle(self, job: Job, rows: list[tuple[int, Tensor, Tensor]]) -> None:
        """Take over the row that agrees furthest; every row's first disagreement is a refused token."""
        for reach, ids, distances in rows:
            if reach < len(job):
                job.refused.setdefault(reach, {})[int(ids[reach])] = float(distances[reach])
            job.budget.tests += reach - job.verified + (reach < len(job))
        reach, ids, distances = max(rows, key=lambda row: row[0])
        if reach > job.verified or not job.distances:
            job.ids, job.verified, job.distances, job.stage = ids, reach, distances.tolist(), 0
        if job.verified == len(job):
            fits = tuple(self._fit(job, position) for position in range(len(job)))
            near = any(self._rivals.near(fit.position.token_id) for fit in fits)
            job.outcome = self._with_near_twins(job, fits) if near else Outcome((fits,), fits, None, "")

    def _advance(self, job: Job) -> list[Tensor]:
        """What to try next at the first mismatch: a few candidates in whole rows, or a search."""
        at = job.verified
        try:
            job.budget.check()
            refused = job.refused.get(at, {})
            if not refused:  # nothing was run yet
                return [job.ids]
            if job.stage == len(self._ladder):
                return self._search(job)
            count = self._ladder[job.stage]
            job.stage += 1
            order = self._keys(at).order(job.queries[at])[: len(refused) + count].tolist()
            fresh = [token for token in order if token not in refused]
            return [_replaced(job.ids, at, token) for token in fresh[:count]]
        except BudgetSpentError as spent:
            fits = tuple(self._fit(job, position) for position in range(at))
            job.outcome = Outcome((), fits, None, f"Stopped at position {at}: {spent}.")
            return []

    def _search(self, job: Job) -> list[Tensor]:
        """Search one position on the cached prefix; the rest of the proposal goes on behind what fits."""
        at = job.verified
        search = self._search_of(job)
        search.begin([Frame(self._fit(job, position)) for position in range(at)])
        if not search.decide(at):
            job.outcome = search.outcome(())
            return []
        chosen = search.frames[-1]
        token = chosen.chosen.position.token_id
        if chosen.others or token in job.refused[at]:
            # several tokens fit, or a pass over the whole prompt refused this one: alternatives matter now
            job.outcome = search.run()
            return []
        return [_replaced(job.ids, at, token)]

    def _search_of(self, job: Job) -> Search:
        """A search behind the verified part of a prompt, in the proposer's order."""
        prefix = self._model.prefix(self._verifier.layer)
        if job.verified:
            prefix.extend(job.ids[: job.verified])
        return Search(
            job.observed,
            prefix,
            self._verifier,
            lambda position: RankedPolicy(self._keys(position), job.queries[position], prefix.max_candidates),
            self._rivals,
            job.budget,
            job.refused,
        )

    def _with_near_twins(self, job: Job, fits: tuple[Fit, ...]) -> Outcome:
        """Whether prompts that differ by tokens with almost the same embedding fit as well."""
        search = self._search_of(job)
        frames = []
        for fit in fits:
            near = self._rivals.near(fit.position.token_id)
            others = [Fit(replace(fit.position, token_id=t), self._rivals.twins(t)) for t in near]
            frames.append(Frame(fit, others))
        search.begin(frames)
        complete: list[tuple[Fit, ...]] = []
        search.conclude(complete)
        return search.outcome(tuple(complete))

    def _keys(self, position: int) -> Keys:
        return self._proposer.keys(position)

    def _fit(self, job: Job, index: int) -> Fit:
        token = int(job.ids[index])
        position = Position(
            index=index,
            token_id=token,
            distance=job.distances[index],
            tolerance=float(job.tolerances[index]),
            accepted=True,
            runner_up_id=None,
            runner_up_distance=None,
            tests=1 + len(job.refused.get(index, ())),
        )
        return Fit(position, self._rivals.twins(token))


class RankedPolicy:
    """A proposer's order at one position, in growing batches."""

    def __init__(self, keys: Keys, query: Float[Tensor, " rank"], largest: int) -> None:
        self._order = keys.order(query).cpu()
        self._largest = largest
        self._size = 16

    def propose(self, untested: Bool[Tensor, " vocabulary"]) -> Int[Tensor, " candidate"]:
        """The most likely untested tokens."""
        self._order = self._order[untested[self._order]]
        batch = self._order[: min(self._size, self._largest)]
        self._size *= 8
        return batch


def _agreeing(distances: Float[Tensor, " position"], tolerances: Float[Tensor, " position"]) -> int:
    """How many positions agree, counted from the left."""
    wrong = (~(distances <= tolerances)).nonzero()
    return int(wrong[0]) if len(wrong) else len(distances)


def _replaced(ids: Int[Tensor, " position"], at: int, token: int) -> Int[Tensor, " position"]:
    row = ids.clone()
    row[at] = token
    return row
