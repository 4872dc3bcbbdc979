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

from preimage.observations import Tap

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel


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


def states_of_branches(
    model: LanguageModel,
    tap: Tap,
    ids: Int[Tensor, "prompt position"],
    positions: Int[Tensor, "prompt branch"],
    tokens: Int[Tensor, "prompt branch"],
) -> tuple[Float[Tensor, "prompt position d"], Float[Tensor, "prompt branch d"]]:
    """F(prompt) and F(v; prompt[:t], t) of every branch (t, v), in one pass over prompts and branches."""
    rows, trunk = ids.shape
    device = model.device
    positions = positions.to(device)
    places = torch.arange(trunk, device=device).expand(rows, -1)
    with torch.inference_mode():
        states = model.run(
            torch.cat([ids.to(device), tokens.to(device)], dim=1),
            layers=(tap,),
            attention_mask=additive(tree_mask(0, trunk, positions), model.dtype)[:, None],
            position_ids=torch.cat([places, positions], dim=1),
        )[tap]
    return states[:, :trunk], states[:, trunk:]
