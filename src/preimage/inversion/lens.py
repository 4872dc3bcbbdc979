"""The lens: a small network that names the token at every position from its state alone.

It never decides anything; it proposes, and the verifier accepts or refuses. A query is computed from the
states at t-1, t and t+1 and scored against one key for each vocabulary token. The keys are a trained
projection of features the model itself provides (its embedding, and the token's state after two blocks in a
fixed context), so that nothing the size of the vocabulary times the width has to be stored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from preimage.models import LanguageModel

FEATURE_BLOCK = 2  # the block whose states, beside the embedding, describe a token
_CONTEXT_TOKEN = 0
_CHUNK = 1024


@dataclass(frozen=True)
class LensShape:
    """Sizes of a lens."""

    d_model: int
    vocab_size: int
    d_features: int
    rank: int = 512
    hidden: int = 2304
    neighbours: int = 1  # states before and after the position that the query sees

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


class Lens(nn.Module):
    """Queries from states and keys from token features; their product, plus a bias, ranks the tokens."""

    mean: Tensor
    scale: Tensor

    def __init__(self, shape: LensShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.d_model * (1 + 2 * shape.neighbours)
        # The first position is an attention sink with a state unlike all others: it is centred and scaled
        # by statistics of its own (row 0), every other position by theirs (row 1).
        self.register_buffer("mean", torch.zeros(2, shape.d_model))
        self.register_buffer("scale", torch.ones(2, shape.d_model))
        self.enter = nn.LayerNorm(shape.d_model, elementwise_affine=False)
        self.linear = nn.Linear(width, shape.rank)
        self.up = nn.Linear(width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.rank)
        self.leave = nn.LayerNorm(shape.rank)
        self.project = nn.Linear(shape.d_features, shape.rank, bias=False)
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))

    def queries(
        self, states: Float[Tensor, "prompt position d_model"]
    ) -> Float[Tensor, "prompt position rank"]:
        """One query a position."""
        states = states.to(self.bias.dtype)
        first = (states[:, :1] - self.mean[0]) / self.scale[0]
        others = (states[:, 1:] - self.mean[1]) / self.scale[1]
        x = self.enter(torch.cat([first, others], dim=1))
        reach = self.shape.neighbours
        padded = nn.functional.pad(x, (0, 0, reach, reach))
        length = states.shape[1]
        window = torch.cat([padded[:, i : i + length] for i in range(2 * reach + 1)], dim=-1)
        query: Tensor = self.leave(self.linear(window) + self.down(nn.functional.gelu(self.up(window))))
        return query

    def keys(self, features: Float[Tensor, "vocabulary d_features"]) -> Float[Tensor, "vocabulary rank"]:
        """One key a token, from :func:`token_features`."""
        return self.project(features)  # type: ignore[no-any-return]

    def forward(
        self,
        states: Float[Tensor, "prompt position d_model"],
        keys: Float[Tensor, "vocabulary rank"],
    ) -> Float[Tensor, "prompt position vocabulary"]:
        """The score of every token at every position."""
        return self.queries(states) @ keys.T + self.bias


@torch.inference_mode()
def token_features(model: LanguageModel) -> Float[Tensor, "vocabulary d_features"]:
    """What the model itself knows of every token: its embedding, and its state after two blocks.

    The state is that of the token behind one fixed token. Both halves are centred over the vocabulary and
    normalised. Costs a pass of the vocabulary through two blocks (some seconds on two cores).
    """
    behind = model.prefix(min(FEATURE_BLOCK, model.n_layers))
    behind.extend(torch.tensor([_CONTEXT_TOKEN]))
    chunks = torch.arange(model.vocab_size).split(_CHUNK)
    halves = (
        model.embedding_table.float(),
        torch.cat([behind.try_tokens(chunk).float() for chunk in chunks]),
    )
    centred = (half - half.mean(dim=0) for half in halves)
    return torch.cat([nn.functional.normalize(half, dim=1) for half in centred], dim=1)
