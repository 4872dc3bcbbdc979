"""States carried down: from a layer to the ones below it, block by block, as far as that can be undone.

A block adds to what enters it: y = x + g(x). Where what it adds changes less than x does, x = y - g(x) is
found by going round (fixed points, with Anderson's mixing), for all positions at once and without knowing one
token. Blocks of models that were not trained, or not for long, can be undone almost down to the tokens; most
blocks of trained models cannot. How far down it goes is found out on prompts whose states are known.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.inversion.proposers.codebook import sample
from preimage.inversion.proposers.lens import Observed, Valid
from preimage.models import LanguageModel
from preimage.progress import stage

_ROUNDS = 64  # of one block at most
_KEPT = 8  # rounds that are mixed
_CLOSE, _LAST = 1e-3, 5e-2  # what the last round of a block changes: what is off grows from block to block
_IN_VAIN = 12  # rounds that changed no less than one before them
_PROMPTS, _LENGTH = 2, 32  # to find out on
_OFF = 0.2  # relative, of nearly all positions where going down has failed
_lowest: WeakKeyDictionary[LanguageModel, dict[tuple[int, int], int]] = WeakKeyDictionary()


@torch.inference_mode()
def lowered(model: LanguageModel, states: Observed, layer: int, to: int, valid: Valid) -> Observed:
    """What left block ``to``, as far as it can be found out from what left block ``layer``."""
    for block in range(layer, to, -1):
        states = _undo(model, states, block, valid, _CLOSE if block > to + 1 else _LAST)
    return states


def lowest_layer(model: LanguageModel, layer: int) -> int:
    """The lowest layer to which states of this one can be carried down; kept for a model in memory."""
    known = _lowest.setdefault(model, {})
    key = model.edition, layer
    if key not in known:
        known[key] = _find_lowest(model, layer)
    return known[key]


@torch.inference_mode()
def _find_lowest(model: LanguageModel, layer: int) -> int:
    stage("which blocks can be undone")
    ids = sample(model, _PROMPTS)[:, :_LENGTH]
    true = model.states(ids, tuple(range(layer + 1)))
    valid = torch.ones(ids.shape, dtype=torch.bool, device=model.device)
    states = true[layer].float()
    for block in range(layer, 0, -1):
        states, below = _undo(model, states, block, valid, _CLOSE), true[block - 1].float()
        off = (states - below).norm(dim=-1) / below.norm(dim=-1).clamp_min(1e-30)
        if not off.quantile(0.9) <= _OFF:
            return block
    return 0


def _undo(model: LanguageModel, above: Observed, block: int, valid: Valid, close: float) -> Observed:
    """What entered a block that gave ``above``: the first round that changed little, or the least of all."""
    above = above.float()
    close = max(close, torch.finfo(model.dtype).eps)  # no round of half precision changes less
    weight = (valid / above.norm(dim=-1).clamp_min(1e-30))[:, None, :, None]
    tried: list[Tensor] = []
    found: list[Tensor] = []
    best, least, vain = above, torch.inf, 0
    now = above
    for _ in range(_ROUNDS):
        now = now.to(model.dtype).float()
        then = above - (model.lift(now, block - 1, block).float() - now)
        tried, found = [*tried, now][-_KEPT:], [*found, then][-_KEPT:]
        thens = torch.stack(found, dim=1)
        changes = ((thens - torch.stack(tried, dim=1)) * weight).flatten(2)
        size = float(changes[:, -1].norm() / valid.sum().sqrt())
        best, least, vain = (then, size, 0) if size < least else (best, least, vain + 1)
        if least < close or vain == _IN_VAIN:
            break
        now = torch.einsum("pk,pktd->ptd", _mixed(changes), thens)
    return best


def _mixed(changes: Float[Tensor, "prompt round all"]) -> Float[Tensor, "prompt round"]:
    """The weights, of sum 1, with which the changes of some rounds cancel best."""
    gram = (changes @ changes.mT).double()
    scale = gram.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None].clamp_min(1e-30)
    gram = gram / scale + 1e-8 * torch.eye(gram.shape[1], device=gram.device, dtype=gram.dtype)
    weights: Tensor = torch.linalg.solve(gram, torch.ones_like(gram[..., 0]))
    return (weights / weights.sum(dim=1, keepdim=True)).float()
