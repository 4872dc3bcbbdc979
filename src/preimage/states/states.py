"""Hidden states of a set of prompts, in memory or in a bundle on disk."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.errors import BundleError, LayerError, StatesError, clip
from preimage.layers import Layer
from preimage.models import LanguageModel, ModelPreview, require_model
from preimage.observations import Observation
from preimage.states.caches import observed_width
from preimage.states.layout import KeptPositions, Layout, group_by_length, tensor_name
from preimage.storage.places import on_a_disk
from preimage.storage.tensor_file import tensor_bytes
from preimage.views import details, table, view

_ROWS = 256  # prompts looked at together
_RESIDUAL = Observation()  # what a capture keeps
# The types states are kept in, by the names a manifest has for them.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class MemoryStore:
    """Tensors held in this process."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a named tensor."""
        return self.tensors[name][start:stop]

    def write(self, name: str, row: int, tensor: Tensor) -> None:
        """Put rows of a tensor at their place, starting at ``row``."""
        self.tensors[name][row : row + len(tensor)] = tensor

    def sync(self) -> None:
        """Nothing to do: memory is all there is."""


@runtime_checkable
class Store(Protocol):
    """Where tensors are: in memory, in a file, in many."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a named tensor."""


class States:
    """States at chosen layers of a set of prompts, made by :func:`preimage.capture` or :meth:`from_tensor`.

    ``layers`` are those kept, ``positions`` says whether every position of a prompt is or its last alone
    ("all", "last"; "mean": one vector over all of them), ``d_model`` is the width of a state, ``lengths`` has
    every prompt's length in tokens, 0 where a single vector does not tell it. ``observation`` says what was
    seen: the residual stream, or keys and values, or what became of them since.
    ``token_ids`` is None where they were withheld; ``model`` is the identity of the model that made the
    states, None for tensors that came from elsewhere; ``noise_floor`` maps a layer to the largest relative
    difference |h - h'| / |h| seen when the same prompts were computed in other shapes; ``prompts`` says where
    the prompts came from, where that is known. ``states[0]`` is a dictionary of the first prompt's states by
    layer, ``states[0, 15]`` those of one layer, ``states[-1]`` the last prompt's; iterating gives one prompt
    after another. Of states on disk only what is asked for is read.

    >>> import torch
    >>> from preimage import States
    >>> states = States.from_tensor(torch.randn(2, 5, 16), layer=3)
    >>> len(states), states.lengths, tuple(states.at(0, 3).shape), tuple(states.last(3).shape)
    (2, (5, 5), (5, 16), (2, 16))
    >>> tuple(states[0, 3].shape), [tuple(prompt[3].shape) for prompt in states]
    ((5, 16), [(5, 16), (5, 16)])
    """

    def __init__(
        self,
        layout: Layout,
        store: Store,
        *,
        token_ids: Sequence[Sequence[int]] | None,
        model: Mapping[str, Any] | None,
        noise_floor: Mapping[Layer, float],
        dtype: torch.dtype,
        prompts: Mapping[str, Any] | None = None,
        observation: Observation = _RESIDUAL,
    ) -> None:
        self.layout, self.store, self.dtype = layout, store, dtype
        self.layers, self.d_model, self.lengths = layout.layers, layout.d_model, layout.lengths
        self.positions: KeptPositions = layout.positions
        self.token_ids = None if token_ids is None else tuple(tuple(ids) for ids in token_ids)
        self.model = None if model is None else dict(model)
        self.noise_floor = dict(noise_floor)
        self.prompts = None if prompts is None else dict(prompts)
        if layout.positions != observation.positions and layout.positions != "all":
            observation = observation.changed(positions=layout.positions)
        self.observation = observation

    def __len__(self) -> int:
        return self.layout.count

    def __repr__(self) -> str:
        made_by = self.model["name"] if self.model else "an unnamed model"
        seen = self.observation
        what = "states" if seen.place == "residual" else seen.place
        what += " before rotary" if seen.rotary == "before" else ""
        return f"<{what} of {len(self)} prompts at {len(self.layers)} layers, by {made_by}>"

    def __iter__(self) -> Iterator[dict[Layer, Float[Tensor, "position d_model"]]]:
        return (self[prompt] for prompt in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        """``states[0]``: a prompt's states by layer; ``states[0, 15]``: those of one layer, as :meth:`at`."""
        prompt, *layer = key if isinstance(key, tuple) and key else (key,)
        if isinstance(prompt, bool) or not isinstance(prompt, Integral) or len(layer) > 1:
            raise StatesError(
                f"states[{clip(repr(key), 60)}] is no prompt, nor a prompt and a layer.",
                "Use states[0], states[0, 15] or states.last(15), which is every prompt at a layer.",
            )
        index = int(prompt)
        index += len(self) if index < 0 else 0
        if layer:
            return self.at(index, layer[0])
        return {one: self.at(index, one) for one in self.layers}

    def _repr_html_(self) -> str:
        floors = [{"layer": str(layer), "noise_floor": self.noise_floor.get(layer)} for layer in self.layers]
        facts = {
            "prompts": len(self),
            "tokens": sum(self.lengths),
            "positions": self.positions,
            "width": self.d_model,
            "type": str(self.dtype).removeprefix("torch."),
            "token_ids": "withheld" if self.token_ids is None else "kept",
        }
        return view(repr(self)[1:-1], table([facts]), details("Layers", table(floors)))

    def at(self, prompt: int, layer: Layer) -> Float[Tensor, "position d_model"]:
        """States of one prompt at one layer: every position, or the last alone where only it was kept."""
        self._require(layer)
        group, row = self.layout.place(prompt)
        return self.store.rows(tensor_name(layer, group), row, row + 1)[0]

    def several(self, prompts: Sequence[int], layer: Layer) -> Float[Tensor, "prompt position d_model"]:
        """States of several prompts of one length at one layer; not copied where they lie side by side."""
        self._require(layer)
        groups, rows = zip(*map(self.layout.place, prompts), strict=True)
        first = rows[0]
        if len(set(groups)) == 1 and rows == tuple(range(first, first + len(rows))):
            return self.store.rows(tensor_name(layer, groups[0]), first, first + len(rows))
        return torch.stack([self.at(prompt, layer) for prompt in prompts])

    def last(self, layer: Layer) -> Float[Tensor, "prompt d_model"]:
        """The state at the last position of every prompt, in prompt order."""
        self._require(layer)
        out = torch.empty(len(self), self.d_model, dtype=self.dtype)
        for index, group in enumerate(self.layout.groups):
            rows = self.store.rows(tensor_name(layer, index), 0, len(group.prompts))
            out[list(group.prompts)] = rows[:, -1].to("cpu")
        return out

    def require_finite(self, layer: Layer) -> None:
        """Refuse NaN and infinity anywhere in a layer, by prompt, layer and position."""
        self._require(layer)
        for index, group in enumerate(self.layout.groups):
            for start in range(0, len(group.prompts), _ROWS):
                part = group.prompts[start : start + _ROWS]
                rows = self.store.rows(tensor_name(layer, index), start, start + len(part))
                summed = torch.promote_types(rows.dtype, torch.float32)
                if not math.isfinite(float(rows.sum(dtype=summed))):  # they carry through a sum
                    for prompt in part:
                        self.finite_at(prompt, layer)

    def finite_at(self, prompt: int, layer: Layer) -> Float[Tensor, "position d_model"]:
        """The same as :meth:`at`, refusing NaN and infinity by prompt, layer and position."""
        states = self.at(prompt, layer)
        bad = (~torch.isfinite(states).all(dim=-1)).nonzero()
        if len(bad):
            position = int(bad[0]) if self.positions == "all" else self.lengths[prompt] - 1
            where = f", position {position}" if position >= 0 else ""  # of one vector nobody knows it
            raise StatesError(
                f"Prompt {prompt}, layer {layer}{where} holds NaN or infinity.",
                "Capture it again, in float32 if a half-precision model overflowed.",
            )
        return states

    def fingerprint(self, layer: Layer) -> str:
        """SHA-256 over the states of a layer, so that interrupted work knows its own input again."""
        self._require(layer)
        digest = hashlib.sha256(f"{self.layout.groups} {self.positions} {self.dtype}".encode())
        if self.observation.place != "residual":
            digest.update(f"{self.observation.where}".encode())
        for prompt in range(len(self)):
            digest.update(tensor_bytes(self.at(prompt, layer)))
        return digest.hexdigest()

    def require_made_by(self, model: LanguageModel) -> None:
        """Refuse a model that is not the one that made these states."""
        require_model(model)
        self.require_width(model)
        if self.model is not None and self.model["weight_hash"] != model.weight_hash:
            theirs, ours = self.model["dtype"], model.identity.dtype
            raise BundleError(
                f"These states were made by {self.model['name']} ({theirs}, weights "
                f"{self.model['weight_hash'][:12]}), not by {model.name} ({ours}, weights "
                f"{model.weight_hash[:12]}).",
                f"Load that model{f' with dtype {theirs}' if theirs != ours else ''}, or allow any model.",
            )

    def require_width(self, model: LanguageModel | ModelPreview) -> None:
        """Refuse a model whose states cannot be compared with these at all."""
        name = getattr(model, "name", "this model")
        seen, width = self.observation, 0
        if seen.place != "residual" and isinstance(model, LanguageModel) and seen.kept is None:
            width = model.width(seen.tap(self.layers[0], model.n_layers))
        self.require_sizes(name, width or observed_width(model, seen), model.max_length)

    def require_sizes(self, name: str, width: int, max_length: int | None) -> None:
        """Refuse a model of another width, or of fewer positions than these states have."""
        if self.d_model != width:
            names = {"keys": "keys", "values": "values", "kv": "keys and values"}
            seen = names.get(self.observation.place, "states")
            raise StatesError(
                f"These {seen} are {self.d_model} wide, those of {name} are {width}.",
                "Use the model that made them.",
            )
        longest = max(self.lengths, default=0)
        if max_length is not None and longest > max_length:
            raise StatesError(
                f"Prompt {self.lengths.index(longest)} has {longest} positions; {name} takes at most "
                f"{max_length}.",
                "Use the model that made these states.",
            )

    def _require_width(self, name: str, width: int) -> None:
        if self.d_model != width:
            raise StatesError(
                f"These states are {self.d_model} wide, those of {name} are {width}.",
                "Use the model that made them.",
            )

    def save(self, path: str | Path, *, withhold_ids: bool = False) -> Path:
        """Write a bundle: ``states.safetensors`` and ``manifest.json``, all of it or nothing."""
        from preimage.states.bundle import save_bundle

        return save_bundle(self, on_a_disk(path, "a bundle"), withhold_ids=withhold_ids)

    @classmethod
    def from_tensor(
        cls,
        tensor: Tensor | Sequence[Tensor],
        layer: Layer,
        model: LanguageModel | None = None,
        *,
        observation: Observation = _RESIDUAL,
    ) -> States:
        """Wrap what somebody already has: positions x d, prompts x positions x d, or a list of positions x d.

        Where ``observation.positions`` is "last" or "mean" every prompt has one row.
        """
        for part in (tensor,) if isinstance(tensor, Tensor) else tensor:
            allowed = (2, 3) if part is tensor else (2,)
            if part.ndim not in allowed or part.dtype not in DTYPES.values() or part.numel() == 0:
                raise StatesError(
                    f"A tensor of shape {tuple(part.shape)} and type {part.dtype} holds no states.",
                    "Give floating-point positions x d_model, or prompts x positions x d_model.",
                )
        layout, batches = _lay_out(tensor, layer, observation.positions)
        store = MemoryStore({tensor_name(layer, index): batch for index, batch in enumerate(batches)})
        states = cls(
            layout,
            store,
            token_ids=None,
            model=model.identity.to_dict() if model else None,
            noise_floor={},
            dtype=batches[0].dtype,
            observation=observation,
        )
        if model is not None:
            states.require_width(model)
        for prompt in range(len(states)):
            states.finite_at(prompt, layer)
        return states

    def _require(self, layer: Layer) -> None:
        if layer not in self.layers:
            kept = ", ".join(map(str, self.layers))
            raise LayerError(f"Layer {layer!r} was not captured.", f"These states hold layer {kept}.")


def _lay_out(tensor: Tensor | Sequence[Tensor], layer: Layer, positions: str) -> tuple[Layout, list[Tensor]]:
    """Where the states of every prompt go, and the tensor of every group of them."""
    if isinstance(tensor, Tensor):
        batch = tensor if tensor.ndim == 3 else tensor[None]
        lengths = [batch.shape[1]] * batch.shape[0]
        groups, batches = group_by_length(lengths), [batch.contiguous()]
    else:
        lengths = [len(prompt) for prompt in tensor]
        groups = group_by_length(lengths)
        batches = [torch.stack([tensor[prompt] for prompt in group.prompts]) for group in groups]
    kept: KeptPositions = "last" if positions == "last" else "mean" if positions == "mean" else "all"
    if kept != "all":
        if set(lengths) != {1}:
            raise StatesError(
                f"Prompts of {max(lengths)} positions were given, and positions {kept!r}.",
                "Give one vector a prompt, or positions 'all'.",
            )
        groups = group_by_length([0] * len(lengths))
    return Layout(groups, (layer,), kept, batches[0].shape[-1]), batches
