"""From evidence to a result: what the states look like, what they read as, and whether that is likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.diagnosis import Diagnosis, diagnose
from preimage.inversion.engine.evidence import Read
from preimage.inversion.engine.judgement import cautious, judge, stands_out
from preimage.inversion.engine.reader import Reader
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.result import Inversion, Position, Reading
from preimage.models import LanguageModel
from preimage.states import noise_of

_SCANS = 4  # positions at which the whole vocabulary is tried, where what was read fits exactly
_SECONDS = 4.0  # spent on what states read as that are something else than was said
_NOTHING = 0.6  # median relative distance above which states look like no layer


class Evidence:
    """Decides prompts by evidence, at one place of a model."""

    def __init__(self, model: LanguageModel, verifier: Verifier, proposer: Proposer, known: int = 0) -> None:
        self._model, self._verifier, self._proposer = model, verifier, proposer
        self._known = known  # first positions that were not observed: their tokens are known
        self._reader = Reader(model, verifier, proposer, known)

    def decide(
        self,
        results: Sequence[Inversion],
        observed: Sequence[Float[Tensor, "_ d"]],
        budgets: Sequence[Budget],
        settled: Sequence[Sequence[int]],
    ) -> list[tuple[Inversion, bool]]:
        """Results with their reading, `likely` where it is; and whether it is known what the states are.

        ``settled``: tokens from the left that are known or fit exactly. Behind some that fit exactly a state
        was changed, and nothing is likely.
        """
        looks = [Diagnosis()] * len(results)
        unseen = [index for index, tokens in enumerate(settled) if not tokens]
        if unseen and self._verifier.kept is None:
            some = [observed[index] for index in unseen]
            for index, one in zip(
                unseen, diagnose(self._model, some, self._verifier.tap, self._proposer), strict=True
            ):
                looks[index] = one
        decided: dict[int, tuple[Inversion, bool]] = {}
        for index, look in enumerate(looks):
            if look.words and not (look.foreign and self._coarse(observed[index])):
                reading = self._read_as(look, observed[index], budgets[index])
                decided[index] = replace(results[index], reading=reading, reason=look.words), True
        left = [index for index in range(len(results)) if index not in decided]
        reads = self._reader.read(
            [observed[index] for index in left],
            [budgets[index] for index in left],
            [settled[index] for index in left],
            [results[index].token_ids for index in left],
        )
        for index, read in zip(left, reads, strict=True):
            decided[index] = self._decided(results[index], read, looks[index], len(settled[index]))
        return [decided[index] for index in range(len(results))]

    def _coarse(self, observed: Float[Tensor, "position d"]) -> bool:
        """Whether so few bits were kept of most states that what they have in common is lost too."""
        return 2 * self._verifier.target(observed).coarse > len(observed)

    def _decided(
        self, result: Inversion, read: Read, looks: Diagnosis, settled: int
    ) -> tuple[Inversion, bool]:
        """What a reading makes of a result, behind so many tokens that are known or fit exactly."""
        clean = settled > self._known
        coarse = torch.finfo(self._model.dtype).eps > 1e-4
        verdict = judge(read, settled, coarse=coarse)
        if not clean and all(away <= radius for away, radius in zip(read.distances, read.radii, strict=True)):
            if (coarse or read.coarse > _SCANS) and stands_out(read, settled):
                words = "Every token fits what is known so coarsely; not all others were tried."
                return self._likely(result, read, words), True
            return replace(result, reading=self._reading(read.ids, read.confidence)), False
        if verdict.likely and not clean:
            return self._likely(result, read, verdict.words), True
        reason = verdict.words
        if looks.away > _NOTHING:
            reason += f" They look like no layer of {self._model.name}: another model's, or changed."
        reading = self._reading(read.ids, cautious(read.confidence, settled))
        return replace(result, reading=reading, reason=result.reason or reason), False

    def _likely(self, result: Inversion, read: Read, words: str) -> Inversion:
        reading = self._reading(read.ids, read.confidence)
        positions = []
        for index, (token, away) in enumerate(zip(read.ids, read.distances, strict=True)):
            weighed = read.weighed[index]  # None of a known token
            tried = [] if weighed is None else zip(weighed.distances, weighed.tokens, strict=True)
            others = sorted((distance, other) for distance, other in tried if other != token)
            rival_away, rival = others[0] if others else (None, None)
            radius = read.radii[index]
            positions.append(
                Position(index, token, away, radius, away <= radius, rival, rival_away, read.tests[index])
            )
        margins = [one.runner_up_distance for one in positions if one.runner_up_distance is not None]
        return replace(
            result,
            status="likely",
            token_ids=reading.token_ids,
            text=reading.text,
            positions=tuple(positions),
            margin=min(margins, default=None),
            reading=reading,
            failed_position=None,
            failed_distance=None,
            reason=words,
        )

    def _read_as(self, looks: Diagnosis, observed: Tensor, budget: Budget) -> Reading:
        """What states read as where they are something else than was said."""
        layer = self._verifier.layer if looks.layer is None else looks.layer
        verifier, proposer = self._verifier, self._proposer
        if layer != verifier.layer:
            verifier = Verifier(self._model, layer, noise=noise_of(self._model, layer)[layer])
            proposer = build_proposer(self._model, layer)
        before = list(looks.before)
        # Of a foreign state there is nothing to read but what is proposed; nobody waits long for the others,
        # which are read in full where they are said to be what they are.
        part = Budget(0, None) if looks.foreign else budget.at_most(_SECONDS)
        rows = observed.to(self._model.device)
        if before:
            own = self._model.states(torch.tensor([before]), (layer,))[layer][0]
            rows = torch.cat([own.to(rows), rows])
        reader = Reader(self._model, verifier, proposer, len(before))
        (read,) = reader.read([rows], [part], [before])
        budget.tests += part.tests
        sure = [0.0] * len(read.ids) if looks.foreign else read.confidence
        return self._reading(read.ids[len(before) :], sure[len(before) :])

    def _reading(self, ids: Sequence[int], confidence: Sequence[float]) -> Reading:
        return Reading(tuple(ids), self._model.decode(ids), tuple(confidence))
