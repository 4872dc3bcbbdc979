"""What a page is told: tokens as text that can be seen, results, and what is settled while work goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from preimage.inversion import Inversion, Position
from preimage.markup import plainly
from preimage.models import LanguageModel
from preimage.progress import Progress, Watch
from preimage.web.queue import Job

_EVERY = 0.05  # seconds between two words on what is settled
_COUNTS = 0.25  # the same of passes alone
_TOKEN = 60  # letters of a token that are shown
_SIGNS = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})


class EnoughError(BaseException):  # a signal like Stopped: the time of one method, not of the job, is over
    """Raised inside a method that is stopped, while its job goes on."""


def token_text(model: LanguageModel, token: int) -> str:
    """A token as it is shown: nothing in it is hidden, and line breaks are signs."""
    text = model.decode([token])
    return f"[{token}]" if not text else plainly(text.translate(_SIGNS), _TOKEN)


def end_of(job: Job) -> Watch:
    """For work of which nothing is told: it ends where its job does."""
    return Watch(job.check, job.check, lambda ids, count: None)


class Onlooker:
    """Looks on while one method inverts one prompt, and tells the page; a job's end is the method's.

    Passes are counted from the first proposal on: what is made ready once for all prompts comes before.
    """

    def __init__(self, job: Job, model: LanguageModel, by: str, length: int, most: float = math.inf) -> None:
        self._job, self._model, self._by, self._length = job, model, by, length
        self._began = self._said = self._counted = 0.0
        self._most, self._tokens = most, 0
        self._shown: list[int] = []
        self._late: tuple[list[int], int] | None = None
        self.passes, self.settled = 0, 0

    @property
    def watch(self) -> Watch:
        """As work is told of it."""
        return Watch(self._passing, self._job.check, self._settled)

    @property
    def spent(self) -> dict[str, Any]:
        """Passes, tokens they ran, and seconds."""
        if not self._began:
            return {"passes": 0, "forward_tokens": 0, "seconds": 0.0}
        ran = self._model.forward_tokens - self._tokens
        return {"passes": self.passes, "forward_tokens": ran, "seconds": time.perf_counter() - self._began}

    def finish(self) -> None:
        """Say what was left unsaid."""
        if self._late is not None:
            self._say(*self._late)
        self._job.tell("count", by=self._by, **self.spent)

    def _passing(self) -> None:
        self._job.check()
        if not self._began:
            return
        now = time.perf_counter()
        if now - self._began > self._most:
            raise EnoughError
        self.passes += 1
        if now - self._counted > _COUNTS:
            self._counted = now
            self._job.tell("count", by=self._by, **self.spent)

    def _settled(self, ids: Sequence[int], count: int) -> None:
        now = time.perf_counter()
        if not self._began:
            self._began, self._tokens = now, self._model.forward_tokens
        self.settled = count
        if now - self._said < _EVERY:
            self._late = list(ids), count
        else:
            self._said = now
            self._say(ids, count)

    def _say(self, ids: Sequence[int], count: int) -> None:
        self._late = None
        shown = list(ids)
        changed = [
            [at, token_text(self._model, token)]
            for at, token in enumerate(shown)
            if at >= len(self._shown) or self._shown[at] != token
        ]
        self._shown = shown + self._shown[len(shown) :]
        self._job.tell("settled", by=self._by, count=count, length=self._length, changed=changed)


def stages_to(job: Job) -> Progress:
    """Progress as the page has it: what begins now; a job that is to end ends here too."""

    def told(done: int, total: int, note: str) -> None:
        job.check()
        job.tell("stage", text=plainly(note, 200), done=done, total=total)

    return told


def result_of(
    model: LanguageModel, found: Inversion, lengths: Sequence[float], truth: Sequence[int] | None
) -> dict[str, Any]:
    """One inversion as the page has it; distances of positions are shares of their state's length."""
    ids = found.reading.token_ids or found.token_ids
    where = {position.index: position for position in found.positions}
    tokens = [
        _token(model, token, at, found, where.get(at), lengths[at] if at < len(lengths) else None, truth)
        for at, token in enumerate(ids)
    ]
    text = found.text if found.status in ("recovered", "likely", "ambiguous") else found.reading.text
    return {
        "status": found.status,
        "text": None if text is None else plainly(text),
        "tokens": tokens,
        "layer": str(found.layer),
        "exact": None if truth is None else found.claims(truth),
        "reason": plainly(found.reason, 2000),
        "uniqueness": plainly(found.uniqueness, 1000),
        "unique": found.unique,
        "alternatives": [plainly(_text(model, ids), 500) for ids in found.alternatives[:8]],
        "fitting": found.fitting,
        "proposer": plainly(found.proposer, 100),
        "setup_seconds": found.setup_seconds,
        "noise_floor": found.noise_floor,
    }


def _token(
    model: LanguageModel,
    token: int,
    at: int,
    found: Inversion,
    position: Position | None,
    length: float | None,
    truth: Sequence[int] | None,
) -> dict[str, Any]:
    confidence = found.reading.confidence
    told: dict[str, Any] = {
        "text": token_text(model, token),
        "id": token,
        "confidence": confidence[at] if at < len(confidence) else None,
        "right": None if truth is None else at < len(truth) and truth[at] == token,
        "distance": None,
        "allowed": None,
        "other": None,
        "other_distance": None,
    }
    if position is None or not length:
        return told
    other = position.runner_up_id
    away = position.runner_up_distance
    return told | {
        "distance": _share(position.distance, length),
        "allowed": _share(position.radius, length),
        "other": None if other is None or other < 0 else token_text(model, other),
        "other_distance": _share(away, length),
    }


def _share(value: float | None, length: float) -> float | None:
    return None if value is None or not math.isfinite(value) else value / length


def _text(model: LanguageModel, ids: Sequence[int]) -> str:
    return model.decode(ids) or " ".join(map(str, ids))
