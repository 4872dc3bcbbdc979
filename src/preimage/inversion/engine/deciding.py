"""From evidence to a result: what the states look like, what they read as, and whether that is likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.diagnosis import Diagnosis, diagnose, leans
from preimage.inversion.engine.evidence import Read
from preimage.inversion.engine.judgement import Judgement, cautious, judge, stands_out
from preimage.inversion.engine.reader import Reader
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.proposers.registry import build_proposer
from preimage.inversion.proposers.standard import Proposer
from preimage.inversion.result import Inversion, Position, Reading
from preimage.models import LanguageModel
from preimage.observations import Site
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
        begun = [
            self._reader.begin(rows, budget, tokens, result.token_ids)
            for result, rows, budget, tokens in zip(results, observed, budgets, settled, strict=True)
        ]
        unseen = [index for index, tokens in enumerate(settled) if not tokens]
        unseen = unseen if self._verifier.kept is None else []
        seen = self._reader.look(begun)
        reads: dict[int, Read] = {}

        def read(some: Sequence[int]) -> None:
            reads.update(zip(some, self._reader.read([begun[index] for index in some]), strict=True))

        # states of another layer may look noisy at first, and never once they are read
        noisy = [index for index in unseen if seen[index].noise is not None and self._leans(observed[index])]
        read(noisy)
        open_ = [index for index in unseen if index not in reads or not self._judge(reads[index], 0).noise]
        open_ = [
            index for index in open_ if not budgets[index].over
        ]  # whose time is over wants no more passes
        some = [observed[index] for index in open_]
        looks = [Diagnosis()] * len(results)
        diagnoses = diagnose(self._model, some, self._verifier.tap, self._proposer)
        for index, look in zip(open_, diagnoses, strict=True):
            looks[index] = look
        decided: dict[int, tuple[Inversion, bool]] = {}
        for index, look in enumerate(looks):
            if look.words and not (look.foreign and self._coarse(observed[index])):
                reading = self._read_as(look, observed[index], budgets[index])
                decided[index] = replace(results[index], reading=reading, reason=look.words), True
        read([index for index in range(len(results)) if index not in decided and index not in reads])
        for index in range(len(results)):
            if index not in decided:
                decided[index] = self._decided(
                    results[index], reads[index], looks[index], len(settled[index])
                )
        return [decided[index] for index in range(len(results))]

    def _leans(self, observed: Float[Tensor, "position d"]) -> bool:
        tap = self._verifier.tap
        return isinstance(tap, Site) or leans(self._model, observed.to(self._model.device), tap)

    def _judge(self, read: Read, settled: int) -> Judgement:
        return judge(read, settled, coarse=self._rounds)

    @property
    def _rounds(self) -> bool:
        """Whether the model's arithmetic is so coarse that nothing fits exactly."""
        return torch.finfo(self._model.dtype).eps > 1e-4

    def _coarse(self, observed: Float[Tensor, "position d"]) -> bool:
        """Whether so few bits were kept of most states that what they have in common is lost too."""
        return 2 * self._verifier.target(observed).coarse > len(observed)

    def _decided(
        self, result: Inversion, read: Read, looks: Diagnosis, settled: int
    ) -> tuple[Inversion, bool]:
        """What a reading makes of a result, behind so many tokens that are known or fit exactly."""
        clean = settled > self._known
        verdict = self._judge(read, settled)
        if not clean and all(away <= radius for away, radius in zip(read.distances, read.radii, strict=True)):
            if (self._rounds or read.coarse > _SCANS) and stands_out(read, settled):
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
        begun = [reader.begin(rows, part, before)]
        reader.look(begun)
        (read,) = reader.read(begun)
        budget.tests += part.tests
        sure = [0.0] * len(read.ids) if looks.foreign else read.confidence
        return self._reading(read.ids[len(before) :], sure[len(before) :])

    def _reading(self, ids: Sequence[int], confidence: Sequence[float]) -> Reading:
        return Reading(tuple(ids), self._model.decode(ids), tuple(confidence))
