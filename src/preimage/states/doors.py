"""The doors people come through: whatever they have of a prompt's states, made into :class:`States`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from preimage.errors import LayerError, OptionError, StatesError, first_line
from preimage.layers import Layer, parse_layer
from preimage.models import LanguageModel, ModelPreview, require_model
from preimage.observations import Observation, Site
from preimage.states.caches import IN_A_CACHE, head_sizes, is_cache, join_heads, read_cache
from preimage.states.padding import lengths_in, without_padding
from preimage.states.states import DTYPES, States


def states_from(
    x: Any,
    model: LanguageModel | ModelPreview,
    layer: int | str | None = None,
    *,
    observe: str | Observation | None = None,
    attention_mask: Any = None,
    positions: str | None = None,
) -> States:
    """States of what somebody has; nothing is guessed, and what cannot be meant is refused.

    ``x``: a tensor or array (position x d, or prompt x position x d), a list of position x d, one a prompt,
    ``outputs.hidden_states``, ``past_key_values``, the outputs of a pass with one of these, or
    :class:`States`. Keys and values alone may also come as prompt x heads x position x size of a head. The
    type of the numbers is kept: it says what they were rounded to. ``layer`` in the convention of
    :mod:`preimage.layers`, for keys and values the block; of a cache, None is the lowest block that is whole.
    ``observe``: what was seen; None is the residual stream, and of a cache ``kv``. ``attention_mask``: prompt
    x position of 0 and 1; padding on either side is cut off. ``positions``: of ``observe``, said here; with
    "last" or "mean" the rows of prompt x d are prompts. Which model made the states is not claimed.

    >>> import preimage, torch
    >>> model = preimage.models.new_model("llama", (16, 1, 2), vocabulary=50, max_length=16, device="cpu")
    >>> ids = torch.tensor([[0, 7, 3], [4, 9, 5]])
    >>> outputs = model.module(ids, attention_mask=ids != 0, output_hidden_states=True)
    >>> preimage.states_from(outputs, model, "final", attention_mask=ids != 0).lengths
    (2, 3)
    """
    if not isinstance(model, ModelPreview):
        require_model(model)
    if isinstance(x, States):
        return _agreeing(x, None if observe is None else Observation.of(observe), positions, attention_mask)
    if isinstance(x, Mapping):
        x = _of_outputs(x, Observation.of(observe).place, layer)
    cached = is_cache(x)
    observation = _with_positions(Observation.of(observe or ("kv" if cached else None)), positions)
    at: Layer
    if cached:
        at, x = _of_cache(x, model, layer, observation)
    else:
        at = _layer(layer, observation, model.n_layers)
        x = _of_hidden_states(x, at, model.n_layers, observation.place)
        observation = _at_its_layer(observation, (at,))
    prompts = _prompts(x, model, observation)
    if attention_mask is not None:
        prompts = without_padding(prompts, attention_mask)
    states = States.from_tensor(prompts, at, observation=observation)
    states.require_width(model)
    return states


def _with_positions(observation: Observation, positions: str | None) -> Observation:
    if positions is None or positions == observation.positions:
        return observation
    if observation.positions != "all":
        raise OptionError(f"positions {positions!r} and {observation.positions!r} were given.", "Give one.")
    return observation.changed(positions=positions)


def _at_its_layer(observation: Observation, layers: tuple[Layer, ...]) -> Observation:
    """What leaves the last norm is the residual stream at layer "final": one thing has one name in States."""
    final = observation.place == "final" and "final" in layers
    return observation.changed(place="residual") if final else observation


def _layer(layer: int | str | None, observation: Observation, n_layers: int) -> Layer:
    """The layer, for what is inside a block the number of the block."""
    if observation.place == "final":
        if layer is not None and parse_layer(layer, n_layers) != "final":
            raise OptionError(f"Layer {layer} and observe 'final' were given.", "Give one of them.")
        return "final"
    if layer is None:
        raise LayerError("A bare tensor does not say its layer.", "Give layer=.")
    tap = observation.tap(layer, n_layers)
    return tap.block if isinstance(tap, Site) else tap


def _of_outputs(outputs: Mapping[str, Any], place: str, layer: int | str | None) -> Any:
    """The part of a pass's outputs that was meant."""
    if place in IN_A_CACHE:
        wanted, hint = "past_key_values", "Run the model with use_cache=True."
    else:
        wanted, hint = "hidden_states", "Run the model with output_hidden_states=True, or observe 'kv'."
    found = outputs.get(wanted)
    if found is None and wanted == "hidden_states" and "final" in (place, layer):
        found = outputs.get("last_hidden_state")
    if found is None:
        raise StatesError(f"These outputs hold no {wanted}.", hint)
    return found


def _of_cache(
    cache: Any, model: LanguageModel | ModelPreview, layer: int | str | None, observation: Observation
) -> tuple[int, Shaped[Tensor, "prompt position width"]]:
    if observation.place not in IN_A_CACHE:
        raise OptionError(
            f"A cache holds keys and values, not {observation.place}.", "Observe keys, values or kv."
        )
    tap = None if layer is None else observation.tap(layer, model.n_layers)
    return read_cache(cache, tap.block if isinstance(tap, Site) else None, model.n_layers, observation.place)


def _of_hidden_states(x: Any, layer: Layer, n_layers: int, place: str) -> Any:
    """The layer of ``outputs.hidden_states``; whatever is not that as it is."""
    if not isinstance(x, tuple | list) or not len(x):
        return x
    if any(isinstance(part, tuple | list) for part in x):
        raise StatesError(
            f"A {type(x).__name__} of {type(x[0]).__name__}s holds no states.",
            "Give tensors; of outputs of generate(), hidden_states[0] is the prompt's.",
        )
    shapes = [tuple(getattr(part, "shape", ())) for part in x]
    if not all(len(shape) == 3 for shape in shapes):
        return x
    if len(x) != n_layers + 1 or len(set(shapes)) > 1:
        raise StatesError(
            f"{len(x)} tensors of prompt x position x d were given, of {len(set(shapes))} shapes; "
            f"hidden_states of this model has {n_layers + 1} of one.",
            "Give hidden_states whole, one layer of it, or a list of position x d, one a prompt.",
        )
    if place not in ("residual", "final"):
        raise OptionError(f"hidden_states hold no {place}.", "Observe residual or final.")
    if layer == n_layers:
        raise LayerError(
            f"hidden_states[{n_layers}] is what leaves the final norm, not the output of block {n_layers}.",
            'Ask for layer "final", or hook the block for the other.',
        )
    return x[-1] if layer == "final" else x[layer]


def _prompts(
    x: Any, model: LanguageModel | ModelPreview, observation: Observation
) -> Float[Tensor, "prompt position width"] | list[Tensor]:
    """Prompts of one length as one tensor, of several as a list of position x width."""
    if not isinstance(x, tuple | list):
        return _batch(_as_tensor(x), model, observation)
    prompts = [_as_tensor(part) for part in x]
    if not prompts:
        raise StatesError("An empty list holds no states.", "Give position x d for every prompt.")
    ndim = 1 if observation.positions in ("last", "mean") else 2
    first = prompts[0]
    for index, prompt in enumerate(prompts):
        if prompt.ndim != ndim or prompt.numel() == 0:
            raise StatesError(
                f"Prompt {index} has shape {tuple(prompt.shape)}.",
                "Give position x d for every prompt." if ndim == 2 else "Give one vector for every prompt.",
            )
        if (prompt.shape[-1], prompt.dtype) != (first.shape[-1], first.dtype):
            raise StatesError(
                f"Prompt {index} is {prompt.shape[-1]} wide and {prompt.dtype}, prompt 0 {first.shape[-1]} "
                f"and {first.dtype}.",
                "Give states of one layer of one model, in one type.",
            )
    same_place = [prompt.to(first.device) for prompt in prompts]
    return torch.stack(same_place)[:, None] if ndim == 1 else same_place


def _batch(
    tensor: Tensor, model: LanguageModel | ModelPreview, observation: Observation
) -> Float[Tensor, "prompt position width"]:
    """A tensor in the one shape that it can mean."""
    one_vector = observation.positions in ("last", "mean")
    if tensor.numel() == 0 or tensor.ndim == 0:
        hint = "Give position x d, or prompt x position x d."
    elif tensor.ndim == 1:
        if one_vector:
            return tensor[None, None]
        hint = 'Say whether it is the "last" position or the "mean" (positions=), or give x[None].'
    elif tensor.ndim == 2:
        return tensor[:, None] if one_vector else tensor[None]
    elif tensor.ndim == 3:
        return tensor
    elif tensor.ndim == 4 and observation.place in ("keys", "values"):
        heads, size = head_sizes(model)
        if (tensor.shape[1], tensor.shape[3]) == (heads, size):
            return join_heads(tensor)
        hint = f"Give prompt x {heads} heads x position x {size}, or prompt x position x {heads * size}."
    elif observation.place in IN_A_CACHE:
        hint = "Give the whole cache, prompt x position x width, or keys or values alone with their heads."
    else:
        hint = "Give hidden_states as the tuple it is and say layer=, or one layer of it."
    raise StatesError(f"A tensor of shape {tuple(tensor.shape)} is not the states of prompts.", hint)


def _as_tensor(x: Any) -> Tensor:
    """A tensor of floating-point numbers, in its own type and where it lies."""
    if isinstance(x, np.ndarray):
        try:
            x = torch.from_numpy(np.require(x, dtype=x.dtype.newbyteorder("="), requirements=("C", "W")))
        except (TypeError, ValueError) as error:
            raise StatesError(f"This array cannot be used: {first_line(error)}.", "Give float32.") from error
    if not isinstance(x, Tensor):
        raise StatesError(
            f"A {type(x).__name__} holds no states.",
            "Give a tensor, an array, a list of them, hidden_states, past_key_values or States.",
        )
    if x.dtype not in DTYPES.values():
        few_bits = x.dtype in (torch.int8, torch.uint8) or (x.is_floating_point() and x.dtype.itemsize == 1)
        raise StatesError(
            f"Numbers of type {x.dtype} are no states.",
            "Multiply them by their scales, give float32, and say in what they were stored (stored=)."
            if few_bits
            else f"Give {', '.join(DTYPES)}.",
        )
    if x.layout != torch.strided or x.device.type == "meta":
        raise StatesError("A sparse tensor, or one without numbers, holds no states.", "Give a dense one.")
    return x.detach()


def _agreeing(
    states: States, observe: Observation | None, positions: str | None, attention_mask: Any
) -> States:
    """The states as they are, with what they did not say of themselves; refused where they contradict it."""
    if attention_mask is not None and lengths_in(attention_mask) != states.lengths:
        raise StatesError("The attention mask and these states have other lengths.", "Leave it out.")
    if observe is None and positions is None:
        return states
    own = states.observation
    given = _at_its_layer(observe or own.changed(positions="all"), states.layers)
    given = _with_positions(given, positions)
    agreed = copy(states)
    agreed.observation = own.changed(**{
        field.name: _agreed(field.name, getattr(own, field.name), getattr(given, field.name))
        for field in fields(Observation)
    })  # fmt: skip
    return agreed


def _agreed(field: str, theirs: Any, ours: Any) -> Any:
    """What states say of themselves, or what is said of them where they say nothing."""
    # that numbers were rounded or their order is lost does not show in the states themselves
    if theirs is None or theirs is False or (field == "positions" and (theirs, ours) == ("all", "shuffled")):
        return ours
    unsaid = ours is None or ours is False or (field == "positions" and ours == "all")
    if not unsaid and ours is not theirs and (field == "rotation" or ours != theirs):
        raise StatesError(
            f"{field} {ours!r} was given; these states are of {field} {theirs!r}."
            if field != "rotation"
            else "Another rotation was given than these states have.",
            "Leave it out, or give the tensor itself.",
        )
    return theirs
