"""From what a baseline read to a result: the verifier decides, as for every other method."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from preimage.inversion.baselines.hard_prompts import Guess
from preimage.inversion.engine.budget import Budget
from preimage.inversion.engine.lookalikes import lookalikes_of
from preimage.inversion.engine.policies import RankedPolicy
from preimage.inversion.engine.search import Fit, Outcome, Search
from preimage.inversion.engine.verifier import Target, Verifier
from preimage.inversion.result import Position
from preimage.models import LanguageModel

_RIVALS = 8  # tokens tried at each position of a prompt that fits, itself among them


def confirmed(
    model: LanguageModel, guess: Guess, target: Target, verifier: Verifier, budget: Budget
) -> Outcome:
    """The outcome of a guess: searched around where it reproduces every state, else where it first fails."""
    ids = guess.token_ids
    distances = verifier.whole_sequence(ids, target[: len(ids)]) if ids else []
    radii = target.radii
    fits = [away <= radius for away, radius in zip(distances, radii, strict=False)]
    first = fits.index(False) if False in fits else len(ids)
    if first == len(target):
        prefix = model.prefix(verifier.tap)

        def policy(position: int) -> RankedPolicy:
            return RankedPolicy(_around(model, ids[position]), _RIVALS, prefix.max_candidates)

        return Search(target, prefix, verifier, policy, lookalikes_of(model), budget).run()
    verified = tuple(
        Fit(Position(index, ids[index], distances[index], radii[index], True, None, None, 1), ())
        for index in range(first)
    )
    read = tuple((token, float(index < first)) for index, token in enumerate(ids))
    failure = None
    if first < len(ids):
        failure = Position(first, ids[first], distances[first], radii[first], False, None, None, 1)
        words = f"Its token at position {first} is {distances[first]:.4g} off, {radii[first]:.4g} is allowed."
    else:
        words = f"Nothing was read from position {first} on."
    reason = f"Stopped: {guess.stopped}. {words}" if guess.stopped else words
    return Outcome((), verified, failure, reason, undecided=bool(guess.stopped), read=read)


def _around(model: LanguageModel, token: int) -> Int[Tensor, " vocabulary"]:
    """All tokens, this one first, then those of the nearest embeddings."""
    table = model.embedding_table
    scores = (table - table[token]).float().square().sum(dim=-1)  # a ranking, never a reported distance
    scores[token] = -1.0
    return scores.argsort().cpu()
