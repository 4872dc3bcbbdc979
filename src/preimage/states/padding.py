"""Padded batches: the attention mask beside them says where every prompt begins and ends."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from preimage.errors import OptionError, StatesError, first_line


def without_padding(
    prompts: Float[Tensor, "prompt position width"] | list[Tensor], attention_mask: Any
) -> Float[Tensor, "prompt position width"] | list[Tensor]:
    """Every prompt at its own length: what the mask (prompt x position, 0 and 1) leaves out is cut off."""
    if isinstance(prompts, list):
        raise OptionError(
            "A list and an attention mask were given.", "Leave out the mask: nothing is padded."
        )
    mask = _mask(attention_mask)
    if tuple(mask.shape) != tuple(prompts.shape[:2]):
        raise StatesError(
            f"The attention mask is {' x '.join(map(str, mask.shape))}, the states have "
            f"{' x '.join(map(str, prompts.shape[:2]))} positions.",
            "Give the mask of these very prompts: prompt x position.",
        )
    spans = _spans(mask)
    if all(span == (0, prompts.shape[1]) for span in spans):
        return prompts
    return [prompt[start:stop] for prompt, (start, stop) in zip(prompts, spans, strict=True)]


def _mask(given: Any) -> Bool[Tensor, "prompt position"]:
    try:
        mask = torch.tensor(given.tolist() if hasattr(given, "tolist") else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StatesError(f"The attention mask is no array: {first_line(error)}.", "Give 0 and 1.") from error
    if mask.ndim not in (1, 2) or not bool(((mask == 0) | (mask == 1)).all()):
        raise StatesError(
            f"The attention mask is not 0 and 1 for prompt x position; its shape is {tuple(mask.shape)}.",
            "Give the tokenizer's.",
        )
    return mask.to(torch.bool)[None] if mask.ndim == 1 else mask.to(torch.bool)


def _spans(mask: Bool[Tensor, "prompt position"]) -> list[tuple[int, int]]:
    """From where to where every prompt goes."""
    spans = []
    for index, row in enumerate(mask):
        kept = row.nonzero().flatten().tolist()
        if not kept:
            raise StatesError(f"The attention mask leaves nothing of prompt {index}.", "Leave that one out.")
        if kept[-1] - kept[0] + 1 != len(kept):
            raise StatesError(
                f"The attention mask has a hole in prompt {index}.", "Padding must be before or after it."
            )
        spans.append((kept[0], kept[-1] + 1))
    return spans


def lengths_in(attention_mask: Any) -> tuple[int, ...]:
    """The length of every prompt by its mask."""
    return tuple(stop - start for start, stop in _spans(_mask(attention_mask)))
