"""The lens: a small network that names the token at every position from its state alone.

It never decides anything; it proposes, and the verifier accepts or refuses. A query is computed from the
state at t and its neighbours (t-1 and t+1, or more) and scored against one key for each vocabulary token. The
keys are made of what the model itself knows of a token (its embedding, and its state after two blocks in a
fixed context; or its embedding alone, through a hidden layer), so that nothing the size of the vocabulary
times the width has to be stored. Near the top of a model a state says more of the next token than of its own:
there what the model expects behind the position before is added, as much of it as the lens has learned to
believe at that position.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Observed: TypeAlias = Float[Tensor, "prompt position d_model"]
Valid: TypeAlias = Bool[Tensor, "prompt position"]

_LARGEST = 8.0  # standardised coordinates beyond this are cut: a few massive ones say nothing of the token


@dataclass(frozen=True)
class LensShape:
    """Sizes of a lens; ``d_model`` is how wide what it reads is."""

    d_model: int
    vocab_size: int
    d_features: int
    rank: int = 512
    hidden: int = 2304
    neighbours: int = 1  # states before and after the position that the query sees
    key_hidden: int = 0  # width of a hidden layer from embeddings to keys; 0: keys are of token features
    prior: int = 0  # 1: with a weight a position for what the model expects there

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


class Reading(NamedTuple):
    """What a lens makes of states."""

    queries: Float[Tensor, "prompt position rank"]
    belief: Float[Tensor, "prompt position"] | None  # the weight of what the model expects, where it counts


class Standardise(nn.Module):
    """States centred and scaled, by one set of statistics for attention sinks and one for all others.

    The first position is an attention sink: its state is far longer than others and points
    elsewhere. After it, other positions may become sinks too (a few in a thousand random tokens). They are
    known by how far they lie along the line from ordinary states to first ones.
    """

    mean: Tensor
    scale: Tensor
    axis: Tensor
    threshold: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, d_model))  # row 0: sinks
        self.register_buffer("scale", torch.ones(2, d_model))
        self.register_buffer("axis", torch.zeros(d_model))
        self.register_buffer("threshold", torch.ones(()))

    @torch.no_grad()
    def fit(self, windows: Observed, pairs: Float[Tensor, "pair two d_model"]) -> None:
        """Statistics of long prompts and of prompts of two tokens."""
        first, others = pairs[:, 0].double(), windows[:, 2:].flatten(0, 1).double()
        centre = others.median(dim=0).values
        line = first.median(dim=0).values - centre
        axis = line / line.square().sum().clamp_min(1e-30)
        usual = ((others - centre) @ axis).abs().sort().values
        threshold = (3 * usual[int(0.99 * (len(usual) - 1))]).clamp(0.1, 0.75)
        self.axis.copy_(axis)
        self.mean[1] = centre
        self.threshold.copy_(threshold)
        sinks = torch.cat([first, pairs[:, 1].double()[self.sinks(pairs)[:, 1]]])
        ordinary = others[~self.sinks(windows)[:, 2:].flatten()]
        for row, sample in enumerate((sinks, ordinary)):
            middle = sample.median(dim=0).values
            spread = (sample - middle).abs().median(dim=0).values
            self.mean[row] = middle
            self.scale[row] = 1.5 * spread.clamp_min(1e-6 * spread.max()).clamp_min(1e-12)

    def sinks(self, states: Observed) -> Bool[Tensor, "prompt position"]:
        """Which positions are attention sinks; the first always counts as one."""
        with torch.autocast(self.axis.device.type, enabled=False):  # massive coordinates decide here
            sinks = (states.to(self.axis.dtype) - self.mean[1]) @ self.axis > self.threshold
        sinks[:, :1] = True
        return sinks

    def forward(self, states: Observed) -> Observed:
        """Coordinates of ordinary size at every position."""
        states = states.to(self.mean.dtype)
        kind = (~self.sinks(states)).long()
        return ((states - self.mean[kind]) / self.scale[kind]).clamp(-_LARGEST, _LARGEST)


def window(
    states: Float[Tensor, "prompt position d"], neighbours: int
) -> Float[Tensor, "prompt position window"]:
    """Each position's state beside those before and after it; zeros beyond the ends."""
    padded = nn.functional.pad(states, (0, 0, neighbours, neighbours))
    length = states.shape[1]
    return torch.cat([padded[:, i : i + length] for i in range(2 * neighbours + 1)], dim=-1)


class Lens(nn.Module):
    """Queries from states and keys from token features; their product, plus a bias, ranks the tokens."""

    def __init__(self, shape: LensShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.d_model * (1 + 2 * shape.neighbours)
        self.standardise = Standardise(shape.d_model)
        self.enter = nn.LayerNorm(shape.d_model, elementwise_affine=False)
        self.linear = nn.Linear(width, shape.rank)
        self.up = nn.Linear(width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.rank)
        self.leave = nn.LayerNorm(shape.rank)
        self.project = nn.Linear(shape.d_features, shape.rank, bias=False)
        if shape.key_hidden:
            self.key_up = nn.Linear(shape.d_features, shape.key_hidden)
            self.key_down = nn.Linear(shape.key_hidden, shape.rank, bias=False)
        if shape.prior:
            self.belief = nn.Linear(shape.hidden, 1)
            nn.init.zeros_(self.belief.weight)
            nn.init.constant_(self.belief.bias, 0.5)
        self.bias = nn.Parameter(torch.zeros(shape.vocab_size))

    def read(self, states: Observed, valid: Valid | None = None) -> Reading:
        """One query a position; positions that are not valid are as good as not there."""
        own = self.enter(self.standardise(states))
        seen = window(own if valid is None else own * valid[..., None], self.shape.neighbours)
        hidden = nn.functional.gelu(self.up(seen))
        queries: Tensor = self.leave(self.linear(seen) + self.down(hidden))
        return Reading(queries, self.belief(hidden)[..., 0] if self.shape.prior else None)

    def keys(self, features: Float[Tensor, "vocabulary d_features"]) -> Float[Tensor, "vocabulary rank"]:
        """One key a token, from :func:`features_for` this lens."""
        keys: Tensor = self.project(features)
        if self.shape.key_hidden:
            sized = features * features.shape[1] ** 0.5  # they are of length 1
            keys = keys + self.key_down(nn.functional.gelu(self.key_up(sized)))
        return keys

    def forward(
        self,
        states: Observed,
        keys: Float[Tensor, "vocabulary rank"],
        expected: Float[Tensor, "prompt position vocabulary"] | None = None,
    ) -> Float[Tensor, "prompt position vocabulary"]:
        """The score of every token at every position; ``expected``: the model's logits for that position."""
        queries, belief = self.read(states)
        scores = queries @ keys.T + self.bias
        return scores if belief is None or expected is None else scores + belief[..., None] * expected
