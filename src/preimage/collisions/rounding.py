"""Last states at random parameters in float64, and the line below which rounding alone may put a difference.

A state is computed by inner products of at most k terms, k the longest row of any matrix or the longest
prompt. Each is wrong by at most k units of rounding, relative to what went into it; a block makes a handful
one after another, counted here as eight. So l blocks bring in at most 8 (l + 1) k u, and what is above the
place where an error came in makes it larger by the condition of the map. The condition is measured, not
assumed: what the embedding returns is moved by a relative 2^-36 and the largest relative answer at the layer
is kept.

    bound(l) = 8 (l + 1) k u max(1, condition(l)),    u = 2^-53

This is about 1e-13 of a state's norm for a tiny model and 4e-11 at the top of SmolLM2's 30 blocks: far above
the 1e-16 to 1e-14 that equal states differ by, and far below what separates prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.distances import norms, row_distances
from preimage.layers import Layer
from preimage.models import LanguageModel

_PRODUCTS = 8  # one after another: norm, query and key, score, average, output, norm, up, down
_MOVED = 2.0**-36  # above rounding, and small enough for the answer to be linear
_TOKENS = 4096  # positions in one pass
Ids = tuple[int, ...]


def last_states(
    model: LanguageModel, ids: Sequence[Ids], layers: Sequence[Layer], follow: int | None = None
) -> dict[Layer, Float[Tensor, "prompt d_model"]]:
    """The last state of every prompt, prompts of one length together and nothing padded.

    With ``follow`` a token is put after each prompt: what comes later changes no state before it.
    """
    rows: dict[Layer, list[Tensor]] = {layer: [torch.empty(0)] * len(ids) for layer in layers}
    for places, batch in _batches(ids):
        position = batch.shape[1] - 1
        if follow is not None:
            batch = torch.cat([batch, torch.full((len(batch), 1), follow)], dim=1)
        for layer, states in model.states(batch, layers).items():
            for place, state in zip(places, states[:, position], strict=True):
                rows[layer][place] = state
    return {layer: torch.stack(states) for layer, states in rows.items()}


def most_terms(model: LanguageModel, ids: Sequence[Ids]) -> int:
    """k: the longest row of any matrix of the blocks, or the longest prompt."""
    sizes = [max(part.shape, default=1) for block in model.anatomy.blocks for part in block.parameters()]
    return max(*sizes, *map(len, ids))


def rounding_bounds(
    model: LanguageModel, ids: Sequence[Ids], last: dict[Layer, Float[Tensor, "prompt d_model"]], terms: int
) -> dict[Layer, float]:
    """What rounding may put between equal states, relative to |h| + |h'|, by layer: the bound above.

    ``last`` are the last states of ``ids``, ``terms`` is k.
    """
    generator = torch.Generator().manual_seed(0)

    def move(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        return output * (1 + _MOVED * signs.to(output))

    with model.anatomy.embedding.register_forward_hook(move):
        moved = last_states(model, ids, list(last))
    unit = torch.finfo(torch.float64).eps / 2
    bounds = {}
    for layer, before in last.items():
        answers = row_distances(moved[layer], before) / norms(before)
        condition = max(1.0, float(answers.max()) / _MOVED)
        blocks = model.n_layers + 1 if layer == "final" else layer
        bounds[layer] = _PRODUCTS * (blocks + 1) * terms * unit * condition
    return bounds


def _batches(ids: Sequence[Ids]) -> Iterator[tuple[list[int], Int[Tensor, "batch position"]]]:
    """Prompts of one length, a pass at a time, with their places."""
    lengths: dict[int, list[int]] = {}
    for place, prompt in enumerate(ids):
        lengths.setdefault(len(prompt), []).append(place)
    for length, places in lengths.items():
        size = max(1, _TOKENS // length)
        for start in range(0, len(places), size):
            part = places[start : start + size]
            yield part, torch.tensor([ids[place] for place in part])
