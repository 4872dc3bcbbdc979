"""How far apart the states of two tokens are behind one prefix: the D of the D/2 bound, at some positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.distances import norms, row_distances
from preimage.layers import Layer
from preimage.models import LanguageModel


def measure_margins(
    model: LanguageModel,
    ids: Sequence[Sequence[int]],
    layer: Layer,
    states: Sequence[Float[Tensor, "_ d_model"]],
    count: int,
) -> tuple[float, ...]:
    """D relative to the length of the state, at ``count`` positions spread over prompts.

    D is the distance from a state to the nearest one that another token of the whole vocabulary would have
    made behind the same prefix. Noise shorter than D/2 cannot change which token is nearest (Theorem 3.2 of
    arXiv 2510.15511). Cost: a pass of the vocabulary a position.
    """
    return tuple(
        margin_at(model, ids[prompt], layer, at) / float(norms(states[prompt][at]))
        for prompt, at in spread(ids, count)
    )


def spread(ids: Sequence[Sequence[int]], count: int) -> Iterator[tuple[int, int]]:
    """So many different places, one prompt after another, further along each time."""
    places = dict.fromkeys(
        (index % len(ids), round(share * (len(ids[index % len(ids)]) - 1)))
        for index, share in enumerate(_shares(4 * count))
    )
    yield from list(places)[:count]


def _shares(count: int) -> Iterator[float]:
    """Shares of a length from 0 to 1 that fill it evenly, however many are taken."""
    golden = (math.sqrt(5) - 1) / 2
    return ((index * golden) % 1.0 for index in range(count))


@torch.inference_mode()
def margin_at(model: LanguageModel, ids: Sequence[int], layer: Layer, at: int) -> float:
    """D at one position of a prompt, over the whole vocabulary, in units of a state."""
    prefix = model.prefix(layer)
    if at:
        prefix.extend(torch.tensor(list(ids[:at])))
    true = prefix.try_tokens(torch.tensor([ids[at]]))[0]
    nearest = math.inf
    for tokens in torch.arange(model.vocab_size).split(prefix.max_candidates):
        away = row_distances(prefix.try_tokens(tokens), true)
        away[tokens.to(away.device) == ids[at]] = math.inf
        nearest = min(nearest, float(away.min()))
    return nearest
