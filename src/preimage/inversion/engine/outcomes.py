"""From what a search found to the result a user sees: the status, and how it is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from preimage.inversion.engine.search import MAX_PROMPTS, Fit, Outcome, VerifiedPrompt
from preimage.inversion.engine.verifier import Verifier
from preimage.inversion.options import InvertOptions
from preimage.inversion.result import Inversion, Position, Reading, Status
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
    others = [p.runner_up_distance for p in positions if p.runner_up_distance is not None]
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
    changed = replace(
        result,
        status=status,
        fitting=fitting,
        complete=not outcome.undecided and fitting == len(prompts),
        alternatives=tuple(prompts) if status == "ambiguous" else (),
        reason=reason,
    )
    return changed if status != "recovered" else say_how(changed, vocab_size)


def with_exact_reading(result: Inversion) -> Inversion:
    """The result with what was verified as its reading; where several prompts fit, as sure as they agree."""
    prompts = result.alternatives
    agree = (1.0,) * len(result.token_ids)
    if prompts:
        agree = tuple(
            sum(other[index : index + 1] == (token,) for other in prompts) / len(prompts)
            for index, token in enumerate(result.token_ids)
        )
    return replace(result, reading=Reading(result.token_ids, result.text, agree))


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
        reading=Reading(read, model.decode(read), reading.confidence[known:]),
        alternatives=tuple(prompt[known:] for prompt in result.alternatives),
        failed_position=None if result.failed_position is None else result.failed_position - known,
    )


def say_how(result: Inversion, vocab_size: int) -> Inversion:
    """Say how it is known that nothing else fits."""
    positions = tuple(result.positions)
    whole = [position.tests >= vocab_size for position in positions]
    if all(whole):
        where = f"all {len(whole)} positions" if len(whole) > 1 else "the only position"
        return replace(
            result, unique="proved", uniqueness=f"The whole vocabulary of {vocab_size} was tried at {where}."
        )
    some = [position for position, done in zip(positions, whole, strict=True) if not done]
    nearest = min(
        (p.runner_up_distance / p.radius for p in some if p.runner_up_distance is not None and p.radius),
        default=math.inf,
    )
    tried = [position.tests - 1 for position in some]
    least, most = min(tried), max(tried)
    number = f"{least}" if least == most else f"{least} to {most}"
    words = (
        f"{number} of the other {vocab_size - 1} tokens were tried at {len(some)} positions, those most like "
        f"the recovered one among them: none is nearer than {nearest:.0f} times what is allowed."
    )
    if any(whole):
        words += f" The whole vocabulary was tried at the other {sum(whole)}."
    return replace(result, unique="tested", uniqueness=words)


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
