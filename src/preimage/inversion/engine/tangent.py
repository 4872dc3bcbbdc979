"""Along the tangent: which tokens would move a state towards what was observed.

The state at a position is a smooth function of the embedding there. Its derivative at a token that was
refused, one pass back, scores every other token by how far it would lead along what is missing. Behind
verified tokens that finds the right one where no proposer knows the layer: in random and untrained models
nearly always first, in trained ones within hundreds below the last third of their blocks.
"""

from __future__ import annotations

import logging

import torch
from jaxtyping import Int
from torch import Tensor

from preimage.inversion.engine.verifier import Target, Verifier
from preimage.models import LanguageModel, Prefix

log = logging.getLogger(__name__)

LEADING = 64  # tokens that are worth a look, of all


def tangent_order(
    model: LanguageModel, prefix: Prefix, verifier: Verifier, target: Target, token: int
) -> Int[Tensor, " vocabulary"] | None:
    """Every token, the most promising first, as seen from a refused one; None where there is no gradient."""
    table = model.embedding_table
    try:
        with torch.inference_mode(False), torch.enable_grad():
            proxy = table[token].clone().requires_grad_(True)
            seen = verifier.observe(prefix.try_embeddings(proxy[None]))[0]
            (gradient,) = torch.autograd.grad((seen * target.missing(seen.detach()).to(seen)).sum(), proxy)
    except (RuntimeError, NotImplementedError) as error:  # weights in few bits, or of a kind of their own
        log.info("%s has no gradient: %s", model.name, error)
        return None
    return (table @ gradient).argsort(descending=True).cpu()


def merged(*orders: Int[Tensor, " token"] | None) -> Int[Tensor, " token"] | None:
    """Several orders of the same tokens as one: each token where it comes soonest, the first order first."""
    given = [order for order in orders if order is not None]
    if len(given) < 2:
        return given[0] if given else None
    each = torch.arange(len(given[0]))
    ranks = torch.stack([torch.empty_like(order).scatter_(0, order, each) for order in given])
    best = len(given) * ranks + torch.arange(len(given))[:, None]
    return best.amin(dim=0).argsort()
