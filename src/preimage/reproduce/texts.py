"""Prompts of the items: natural ones, random ones, both, and what the model writes itself."""

from __future__ import annotations

import math

import torch

from preimage.errors import PromptError
from preimage.layers import Layer, parse_layers
from preimage.models import LanguageModel
from preimage.models.sampling import written_by
from preimage.prompts import PromptOptions, PromptSet, gather
from preimage.reproduce.options import Sizes
from preimage.states import capture

_RANDOM = 10  # of the paper's prompts one in so many is of random tokens
_SAME_NEXT = ("same-next:arithmetic", "same-next:translation")


def some(
    model: LanguageModel, sizes: Sizes, *, count: int | None = None, length: int | None = None
) -> PromptSet:
    """Prompts of the source that was chosen, by default prose that no shipped lens was trained on.

    No longer than the model takes. A model without a tokenizer gets random tokens.
    """
    source = sizes.source if model.tokenizer is not None else "random"
    return gather(source, model, _options(model, sizes, count, length))


def mixed(model: LanguageModel, sizes: Sizes) -> list[tuple[int, ...]]:
    """Nine natural prompts of ten, and one of random tokens."""
    drawn = max(1, sizes.count // _RANDOM) if sizes.count > 1 else 0
    prompts = list(some(model, sizes, count=sizes.count - drawn))
    if drawn:
        prompts += gather("random", model, _options(model, sizes, drawn))
    return prompts


def of_kinds(model: LanguageModel, sizes: Sizes) -> dict[str, list[tuple[int, ...]]]:
    """Text the model writes, text it did not see, random tokens; kinds it has none of are left out."""
    kinds: dict[str, list[tuple[int, ...]]] = {}
    start = "bos" if getattr(model.tokenizer, "bos_token_id", None) is not None else "random"
    own = written_by(model, sizes.count, sizes.length, sizes.seed, start=start)  # type: ignore[arg-type]
    if own is not None:
        kinds["written by the model"] = [tuple(row) for row in own.tolist()]
    if model.tokenizer is not None:
        kinds["unseen prose"] = list(some(model, sizes))
    kinds["random tokens"] = list(gather("random", model, _options(model, sizes)))
    if not any(kinds.values()):
        raise PromptError("There are no prompts for this model.", "Give a model with a tokenizer.")
    return kinds


def alike_next(model: LanguageModel, sizes: Sizes) -> dict[int, list[tuple[int, ...]]]:
    """Different prompts by the token that the model expects behind them.

    Few-shot sums and translations that call for one answer; for a model without a tokenizer random tokens.
    Empty for a model without an LM head.
    """
    table = model.unembedding
    if table is None:
        return {}
    if model.tokenizer is None:
        prompts = list(some(model, sizes))
    else:
        options = PromptOptions(count=sizes.count, seed=sizes.seed)
        longest = model.max_length or sizes.length
        asked = [ids for source in _SAME_NEXT for ids in gather(source, model, options)]
        prompts = [ids for ids in asked if len(ids) <= longest]
    last = capture(model, prompts, ["final"], positions="last")
    groups: dict[int, list[tuple[int, ...]]] = {}
    for index, ids in enumerate(prompts):
        with torch.inference_mode():
            scores = last.at(index, "final").reshape(-1).to(table) @ table.T
        groups.setdefault(int(scores.argmax()), []).append(ids)
    return groups


def layers_of(model: LanguageModel, sizes: Sizes) -> list[Layer]:
    """The layers of the sizes that this model has."""
    if sizes.layers == "all":
        return list(parse_layers("all", model.n_layers))
    named = [one.strip() for one in sizes.layers.split(",")]
    has = [one for one in named if one == "final" or int(one) <= model.n_layers]
    return list(parse_layers(",".join(has or ["final"]), model.n_layers))


def layer_of(model: LanguageModel, sizes: Sizes) -> Layer:
    """The one layer of the sizes; of a model without it the middle one."""
    asked = sizes.layers
    if asked.isdecimal() and int(asked) <= model.n_layers:
        return int(asked)
    return "final" if asked == "final" else (model.n_layers + 1) // 2


def _options(
    model: LanguageModel, sizes: Sizes, count: int | None = None, length: int | None = None
) -> PromptOptions:
    longest = model.max_length or math.inf
    fits = int(min(length or sizes.length, longest))
    return PromptOptions(count=count or sizes.count, length=fits, seed=sizes.seed)
