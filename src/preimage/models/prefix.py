"""A prefix computed once, on which any number of candidate tokens is tried.

Trying never changes the prefix: in a trial the cache layer hands out prefix + candidate and stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from preimage.devices import by_device
from preimage.errors import ModelError
from preimage.models.branching import additive, tree_mask
from preimage.models.quirks import quirk_of
from preimage.observations import Tap

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel

# Keys and values one block may materialise for a batch of candidates, and the batch that gains nothing more.
_TRIAL_BYTES = {"cpu": 2**28, "cuda": 2**32}
FEW_TOKENS = 4096  # of a pass that takes longer to launch, on a GPU, than to run
_MAX_CANDIDATES = {"cpu": 1024, "cuda": 8192}


class _PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one block. Keeps the whole prefix, also where attention is windowed.

    transformers' own windowed layer drops what left the window and then cannot be cropped; the window is
    enforced by the attention mask anyway, so keeping everything changes no value.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0  # counted here, because at layer 0 no block ever runs and stores keys
        self.storing = False

    def get_seq_length(self) -> int:
        return self.seen

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._after_prefix(key_states, value_states)
        if self.storing:
            self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values

    def _after_prefix(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            return key, value
        batch = key.shape[0]
        return (
            torch.cat([self.keys.expand(batch, -1, -1, -1), key], dim=-2),
            torch.cat([self.values.expand(batch, -1, -1, -1), value], dim=-2),
        )


def empty_cache(n_layers: int) -> Cache:
    """A cache for so many blocks, which stores nothing unless its layers are told to."""
    return Cache(layers=[_PrefixLayer() for _ in range(n_layers)])


class Prefix:
    """F^l on a growing prefix: extend it, crop it, or try candidates for the next position.

    ``tap``: a layer, or a site inside a block; states are as wide as what is seen there.
    """

    def __init__(self, model: LanguageModel, tap: Tap) -> None:
        reason = quirk_of(model.config).no_prefix
        if reason:
            raise ModelError(
                f"{type(model.module).__name__} cannot be inverted: {reason}.",
                "Capture, collisions and geometry work with it.",
            )
        self.model = self._model = model
        self._tap: Tap = tap
        self._cache = empty_cache(model.n_layers)
        self._parts: list[_PrefixLayer] = self._cache.layers

    def __len__(self) -> int:
        return self._parts[0].seen

    def extend(self, ids: Int[Tensor, " position"]) -> Float[Tensor, "position d"]:
        """Append tokens and return their states, in one pass over the new tokens only."""
        with torch.no_grad(), self._storing():
            states = self._run(self._model.embed(ids)[None])[0]
        self._grow(len(ids))
        return states

    def extend_and_try(
        self,
        ids: Int[Tensor, " position"],
        positions: Int[Tensor, " candidate"],
        tokens: Int[Tensor, " candidate"],
    ) -> tuple[Float[Tensor, "position d"], Float[Tensor, "candidate d"]]:
        """Append tokens, and F(v; prefix[:t], t) for a position t and a token v each, all in one pass.

        The candidates are branches of what the prefix then holds, and leave nothing in it.
        """
        length = len(self) + len(ids)
        with torch.no_grad(), self._storing():
            (states,) = self._branched(torch.cat([ids, tokens])[None], len(ids), positions[None])
        self._grow(len(ids))
        self.crop(length)
        return states[: len(ids)], states[len(ids) :]

    def crop(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        for part in self._parts:
            if part.is_initialized:
                part.keys = part.keys[..., :length, :]
                part.values = part.values[..., :length, :]
            part.seen = min(part.seen, length)

    def try_tokens(self, ids: Int[Tensor, " candidate"]) -> Float[Tensor, "candidate d"]:
        """F(v; prefix, t) for each candidate v at the next position; the prefix stays as it is."""
        with torch.no_grad():
            return self._run(self._model.embed(ids)[:, None])[:, 0]

    def try_rows(self, rows: Int[Tensor, "row more"]) -> Float[Tensor, "row more d"]:
        """States of several more tokens each; the prefix stays as it is."""
        with torch.no_grad():
            return self._run(self._model.embed(rows))

    def try_at(
        self, positions: Int[Tensor, " candidate"], ids: Int[Tensor, " candidate"]
    ) -> Float[Tensor, "candidate d"]:
        """F(v; prefix[:t], t) for a position t and a token v each, as branches of the prefix, in one pass.

        The prefix stays as it is.
        """
        with torch.no_grad():
            return self._branched(ids[None], 0, positions[None])[0]

    def try_layers(
        self, ids: Int[Tensor, " candidate"], layers: Sequence[Tap]
    ) -> dict[Tap, Float[Tensor, "candidate _"]]:
        """The same at several layers or sites, none deeper than the prefix's own."""
        with torch.no_grad():
            states_at = self._model.run(
                embeddings=self._model.embed(ids)[:, None], layers=layers, cache=self._cache
            )
        return {tap: states[:, 0] for tap, states in states_at.items()}

    def try_embeddings(
        self, embeddings: Float[Tensor, "candidate d_embedding"]
    ) -> Float[Tensor, "candidate d"]:
        """The same for continuous embeddings; gradients flow to them."""
        return self._run(embeddings[:, None])[:, 0]

    @property
    def max_candidates(self) -> int:
        """How many candidates fit in one batch here within a fixed amount of memory."""
        # width of the queries' heads, not the keys': grouped-query attention repeats keys to them
        per_candidate = 2 * (len(self) + 1) * self._model.d_model * self._model.dtype.itemsize
        most, memory = (by_device(sizes, self._model.device) for sizes in (_MAX_CANDIDATES, _TRIAL_BYTES))
        return max(1, min(most, memory // per_candidate))

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """A pass whose keys and values are kept."""
        for part in self._parts:
            part.storing = True
        try:
            yield
        finally:
            for part in self._parts:
                part.storing = False

    def _branched(
        self, ids: Int[Tensor, "row token"], new: int, positions: Int[Tensor, "row branch"]
    ) -> Float[Tensor, "row token d"]:
        """States of ``new`` more tokens of the prefix and, behind them, of its branches."""
        positions, past = positions.to(self._model.device), len(self)
        sees = tree_mask(past, new, positions)
        trunk = torch.arange(past, past + new, device=positions.device).expand(len(ids), -1)
        states = self._model.run(
            embeddings=self._model.embed(ids),
            layers=(self._tap,),
            cache=self._cache,
            attention_mask=additive(sees, self._model.dtype)[:, None],
            position_ids=torch.cat([trunk, positions], dim=1),
        )
        return states[self._tap]

    def _run(self, embeddings: Tensor) -> Tensor:
        states = self._model.run(embeddings=embeddings, layers=(self._tap,), cache=self._cache)
        return states[self._tap]

    def _grow(self, count: int) -> None:
        for part in self._parts:
            part.seen += count

    # Several prompts at once: only for branches off them.

    def of_rows(self, ids: Int[Tensor, "row position"]) -> Float[Tensor, "row position d"]:
        """Begin with several prompts, in a pass like any other over them; their states."""
        if not ids.shape[1]:
            return torch.empty(*ids.shape, self._model.width(self._tap), device=self._model.device)
        with self._storing():
            states = self._model.run(ids, layers=(self._tap,), cache=self._cache)[self._tap]
        self._grow(ids.shape[1])
        return states

    def take_rows(self, rows: Int[Tensor, " row"]) -> None:
        """Hold some of the prompts, in another order or more than once."""
        for part in self._parts:
            if part.is_initialized:
                part.keys, part.values = part.keys[rows], part.values[rows]


def states_of_branches(
    model: LanguageModel,
    tap: Tap,
    ids: Int[Tensor, "prompt position"],
    positions: Int[Tensor, "row branch"],
    tokens: Int[Tensor, "row branch"],
    of: Int[Tensor, " row"] | None = None,
) -> tuple[Float[Tensor, "prompt position d"], Float[Tensor, "row branch d"]]:
    """F(prompt), and F(v; prompt[:t], t) of every branch (t, v): a row of them for each prompt.

    Prompts run as in any plain pass, so that their states are what one gives; then branches, on their keys
    and values. ``of`` says which prompt each row is of, where one has more rows than one, or none.
    Without it, so few that launching a pass takes longer than running it are run all at once.
    """
    prefix, length = Prefix(model, tap), ids.shape[1]
    with torch.inference_mode():
        if of is None and ids.numel() + tokens.numel() <= FEW_TOKENS:
            states = prefix._branched(torch.cat([ids, tokens], dim=1), length, positions)
            return states[:, :length], states[:, length:]
        trunk = prefix.of_rows(ids)
        if not tokens.numel():
            return trunk, trunk.new_empty(*tokens.shape, trunk.shape[-1])
        if of is not None:
            prefix.take_rows(of.to(model.device))
        return trunk, prefix._branched(tokens, 0, positions)
