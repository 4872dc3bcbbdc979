"""Tokens tried at many positions of a prompt in one pass: branches off its trunk, and what they see.

A branch is one token at one position. A mask lets it see the tokens of the trunk before its position and
itself, so that its state is F(v; prefix, t), as if it had been tried there alone. A model that does not take
such masks gives other numbers; whoever asks tries a token of the trunk at its own position to see.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def tree_mask(
    past: int, new: int, positions: Int[Tensor, "*prompt branch"]
) -> Bool[Tensor, "*prompt new_and_branch past_new_and_branch"]:
    """What new tokens of a trunk and the branches behind them see of the trunk, and of themselves."""
    *prompts, branches = positions.shape
    device = positions.device
    trunk = torch.arange(past + new, device=device)
    places = torch.cat([trunk[past:].expand(*prompts, -1) + 1, positions], dim=-1)
    before = trunk < places[..., None]
    itself = torch.zeros(new + branches, branches, dtype=torch.bool, device=device)
    itself[new:].fill_diagonal_(True)
    return torch.cat([before, itself.expand(*prompts, -1, -1)], dim=-1)


def additive(sees: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """A mask as attention adds it to its scores."""
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)
