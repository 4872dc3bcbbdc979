"""Tokens read off states at once, without running the model: what interpretability uses as a first look."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from preimage.errors import OptionError
from preimage.inversion.baselines.hard_prompts import Guess, nearest_rows
from preimage.inversion.engine.verifier import Verifier
from preimage.models import LanguageModel
from preimage.observations import Site


def nearest_embedding(model: LanguageModel, observed: Float[Tensor, "position d"]) -> Guess:
    """The token whose input embedding points most nearly the way of each state."""
    table = model.embedding_table
    _require_width(observed, table.shape[-1], "nearest-embedding")
    return Guess(tuple(nearest_rows(observed.to(table.device), normalize(table.float(), dim=-1)).tolist()))


def logit_lens(model: LanguageModel, observed: Float[Tensor, "position d"], verifier: Verifier) -> Guess:
    """The likeliest next token by the LM head at each state, as if the blocks above were not there.

    It names the token that follows rather than the one that was; where embeddings are tied, low layers still
    show the token itself.
    """
    table, norm = model.unembedding, model.anatomy.norm
    if table is None or isinstance(verifier.tap, Site):
        raise OptionError("logit-lens needs states of the stream and an LM head.", "Use another method.")
    _require_width(observed, table.shape[-1], "logit-lens")
    with torch.inference_mode():
        states = observed.to(table)
        if norm is not None and verifier.layer != "final":
            states = norm(states)
        return Guess(tuple((states @ table.T).argmax(dim=-1).tolist()))


def _require_width(observed: Tensor, width: int, method: str) -> None:
    if observed.shape[-1] != width:
        raise OptionError(
            f"{method} needs states of {width} coordinates, and these have {observed.shape[-1]}.",
            "Use another method.",
        )
