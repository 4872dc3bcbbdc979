"""From what a search found to the result a user sees: the status, and how it is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from preimage.inversion.engine.search import MAX_PROMPTS, Fit, Outcome, VerifiedPrompt
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.options import InvertOptions
from preimage.inversion.result import Apart, Inversion, Position, Reading, Status, VerifiedPositions
from preimage.models import LanguageModel


def make_result(
    model: LanguageModel, outcome: Outcome, verifier: Verifier, options: InvertOptions, tests: int
) -> Inversion:
    """The result of one prompt; what is the call's alone is filled in by the caller."""
    best: Sequence[Fit] = outcome.hypotheses[0] if outcome.hypotheses else outcome.partial
    positions: Sequence[Position]
    if isinstance(best, VerifiedPrompt):
        positions, ids = best.positions, best.positions.token_ids
    else:
        positions = tuple(fit.position for fit in best)
        ids = tuple(position.token_id for position in positions)
    others = [away for away, _, _ in _apart(positions) if away is not None]
    failure = None if outcome.hypotheses else outcome.failure
    if failure is not None and failure.index >= len(positions):
        positions = (*positions, failure)
    result = Inversion(
        status="not_recovered",
        token_ids=ids,
        text=model.decode(ids),
        layer=verifier.layer,
        method=options.method,
        proposer="",
        seconds=0.0,
        setup_seconds=0.0,
        forward_tokens=0,
        tests=tests,
        margin=min(others, default=None),
        noise_floor=verifier.noise.relative,
        seed=options.seed,
        positions=positions,
        reading=_read(model, outcome),
        observe="residual",
        order=(),
        fitting=0,
        complete=False,
        unique=None,
        uniqueness="",
        alternatives=(),
        failed_position=None if failure is None else failure.index,
        failed_distance=None if failure is None else failure.distance,
        reason=outcome.reason if not outcome.hypotheses or outcome.undecided else "",
    )
    return with_status(result, outcome, model.vocab_size)


def _read(model: LanguageModel, outcome: Outcome) -> Reading:
    """What a search that found nothing makes of the states."""
    ids = tuple(token for token, _ in outcome.read)
    return Reading(ids, model.decode(ids), tuple(sure for _, sure in outcome.read))


def with_status(result: Inversion, outcome: Outcome, vocab_size: int) -> Inversion:
    """The result with the status that the outcome of a search gives it."""
    fitting, prompts = _expand(outcome.hypotheses)
    status: Status = "not_recovered"
    if fitting:
        status = "ambiguous" if fitting > 1 or outcome.undecided else "recovered"
    reason = result.reason
    if fitting > len(prompts) and not outcome.undecided:
        reason = f"The first {len(prompts)} of {fitting} prompts that fit are listed."
    how: dict[str, Any] = say_how(result.positions, vocab_size) if status == "recovered" else {}
    return replace(
        result,
        status=status,
        fitting=fitting,
        complete=not outcome.undecided and fitting == len(prompts),
        alternatives=tuple(prompts) if status == "ambiguous" else (),
        reason=reason,
        **how,
    )


def exact_reading(result: Inversion) -> Reading:
    """What was verified, as a reading; where several prompts fit, as sure as they agree."""
    prompts = result.alternatives
    agree = (1.0,) * len(result.token_ids)
    if prompts:
        agree = tuple(
            sum(other[index : index + 1] == (token,) for other in prompts) / len(prompts)
            for index, token in enumerate(result.token_ids)
        )
    return Reading(result.token_ids, result.text, agree)


def spelled(reading: Reading, model: LanguageModel) -> Reading:
    """The reading with the text of each token by itself."""
    return reading._replace(tokens=model.spell(reading.token_ids))


def without_prefix(result: Inversion, known: int, model: LanguageModel) -> Inversion:
    """The result of the tokens behind known ones alone."""
    if not known:
        return result
    ids, reading = result.token_ids[known:], result.reading
    read = reading.token_ids[known:]
    return replace(
        result,
        token_ids=ids,
        text=model.decode(ids),
        positions=tuple(one._replace(index=one.index - known) for one in result.positions[known:]),
        reading=Reading(read, model.decode(read), reading.confidence[known:], reading.tokens[known:]),
        alternatives=tuple(prompt[known:] for prompt in result.alternatives),
        failed_position=None if result.failed_position is None else result.failed_position - known,
    )


def _apart(positions: Sequence[Position]) -> list[Apart]:
    """How far off the nearest other token is, what is allowed and how many were tried, everywhere."""
    if isinstance(positions, VerifiedPositions):
        return list(positions.apart())
    return [(one.runner_up_distance, one.radius, one.tests) for one in positions]


def say_how(positions: Sequence[Position], vocab_size: int) -> dict[str, str]:
    """How it is known that nothing else fits: ``unique`` and ``uniqueness`` of a recovered prompt."""
    every = _apart(positions)
    some = [one for one in every if one[2] < vocab_size]
    if not some:
        where = f"all {len(every)} positions" if len(every) > 1 else "the only position"
        words = f"The whole vocabulary of {vocab_size} was tried at {where}."
        return {"unique": "proved", "uniqueness": words}
    nearest = min(
        (away / radius for away, radius, _ in some if away is not None and radius), default=math.inf
    )
    tried = [tests - 1 for _, _, tests in some]
    least, most = min(tried), max(tried)
    number = f"{least}" if least == most else f"{least} to {most}"
    words = (
        f"{number} of the other {vocab_size - 1} tokens were tried at {len(some)} positions, those most like "
        f"the recovered one among them: none is nearer than {nearest:.0f} times what is allowed."
    )
    if len(some) < len(every):
        words += f" The whole vocabulary was tried at the other {len(every) - len(some)}."
    return {"unique": "tested", "uniqueness": words}


def say_of_last(result: Inversion, tried: str) -> Inversion:
    """The same of one vector for a whole prompt: most prompts were not tried, so nothing is proved."""
    if result.status != "recovered":
        return result
    words = f"{tried} Other longer prompts cannot be tried one by one, and nothing is proved of them."
    return replace(result, unique="tested", uniqueness=words)


# Why what fits is likely and no more: how coordinates were changed was found out, or positions are missing.
PUT_BACK = "It fits the states put back as fits best; other ways to put them back were not all tried."
FILLED = "It fits, with tokens found for the positions whose states are missing; not all others were tried."


def as_likely(result: Inversion, words: str) -> Inversion:
    """The same where other prompts may fit too: not all that could be were tried."""
    if result.status != "recovered":
        return replace(result, complete=False)
    return replace(
        result, status="likely", fitting=0, complete=False, unique=None, uniqueness="", reason=words
    )


def _expand(hypotheses: tuple[Sequence[Fit], ...]) -> tuple[int, list[tuple[int, ...]]]:
    """How many prompts fit, and the first of them: each hypothesis with its twins exchanged freely."""
    total = 0
    listed: list[tuple[int, ...]] = []
    for fits in hypotheses:
        if isinstance(fits, VerifiedPrompt):
            total += 1
            listed.append(fits.positions.token_ids)
            continue
        choices = [(fit.position.token_id, *fit.twins) for fit in fits]
        total += math.prod(map(len, choices))
        listed += list(itertools.islice(itertools.product(*choices), MAX_PROMPTS - len(listed)))
    return total, listed
