"""Tokens tried at many positions of a prompt in one pass: branches off its trunk.

A branch is one token at one position. A mask lets it see the tokens of the trunk before its position and
itself, so that its state is F(v; prefix, t), as if it had been tried there alone. A model that does not take
such masks gives other numbers; whoever asks tries a token of the trunk at its own position to see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from preimage.layers import Layer

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel


def branch_mask(
    trunk: int, positions: Int[Tensor, "*prompt branch"]
) -> Bool[Tensor, "*prompt branch trunk_and_branch"]:
    """What each branch sees of a trunk of some length and of the branches behind it."""
    branches = positions.shape[-1]
    before = torch.arange(trunk, device=positions.device) < positions[..., None]
    itself = torch.eye(branches, dtype=torch.bool, device=positions.device).expand(*before.shape[:-1], -1)
    return torch.cat([before, itself], dim=-1)


def additive(sees: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """A mask as attention adds it to its scores."""
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)


def states_of_branches(
    model: LanguageModel,
    layer: Layer,
    ids: Int[Tensor, "prompt position"],
    positions: Int[Tensor, "prompt branch"],
    tokens: Int[Tensor, "prompt branch"],
) -> Float[Tensor, "prompt branch d_model"]:
    """F(v; prompt[:t], t) of every branch (t, v) of every prompt, in one pass over prompts and branches."""
    rows, trunk = ids.shape
    device = model.device
    positions = positions.to(device)
    causal = torch.ones(trunk, trunk, dtype=torch.bool, device=device).tril()
    blind = torch.zeros(trunk, positions.shape[1], dtype=torch.bool, device=device)
    own = torch.cat([causal, blind], dim=1).expand(rows, -1, -1)
    sees = torch.cat([own, branch_mask(trunk, positions)], dim=1)
    places = torch.arange(trunk, device=device).expand(rows, -1)
    with torch.inference_mode():
        states = model.run(
            torch.cat([ids.to(device), tokens.to(device)], dim=1),
            layers=(layer,),
            attention_mask=additive(sees, model.dtype)[:, None],
            position_ids=torch.cat([places, positions], dim=1),
        )[layer]
    return states[:, trunk:]
