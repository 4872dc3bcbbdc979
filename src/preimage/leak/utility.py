"""What a defence costs: how far the model's next tokens move when it goes on with changed states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from preimage.layers import Layer
from preimage.leak.result import Utility
from preimage.models import LanguageModel
from preimage.observations import Observation
from preimage.states.layout import group_by_length

_LOGITS = 1 << 24  # numbers of logits held at a time


def filled(seen: Sequence[Tensor], told: Observation, plain: Sequence[Tensor]) -> list[Tensor] | None:
    """What the model itself would go on with: what was cut is filled with the mean of each coordinate.

    None where it cannot go on: one vector, some positions, positions in another order.
    """
    if told.positions != "all" or told.at is not None or told.permuted or told.rotated:
        return None
    if told.kept is None:
        return [one.float() for one in seen]
    mean = torch.cat([one.float().cpu() for one in plain]).mean(dim=0)
    whole = []
    for one in seen:
        rows = mean.expand(len(one), -1).clone()
        rows[:, list(told.kept)] = one.float()
        whole.append(rows)
    return whole


def measure_utility(
    model: LanguageModel,
    ids: Sequence[Sequence[int]],
    layer: Layer,
    plain: Sequence[Float[Tensor, "_ d_model"]],
    changed: Sequence[Float[Tensor, "_ d_model"]],
) -> Utility:
    """The next tokens from changed states beside those from plain ones, over all positions of all prompts.

    Cost: two passes from ``layer`` up, and the LM head twice, for every prompt.
    """
    kl = other = before = after = 0.0
    positions = predicted = 0
    for some in _batches(ids, model.vocab_size):
        logits = [
            model.logits_from(torch.stack([rows[index].to(model.device) for index in some]), layer)
            .float()
            .log_softmax(dim=-1)
            for rows in (plain, changed)
        ]
        ours, theirs = logits
        kl += float((ours.exp() * (ours - theirs)).sum(dim=-1).double().sum())
        other += float((ours.argmax(dim=-1) != theirs.argmax(dim=-1)).sum())
        positions += ours.shape[0] * ours.shape[1]
        truth = torch.tensor([list(ids[index][1:]) for index in some], device=ours.device)[..., None]
        if truth.shape[1]:
            before -= float(ours[:, :-1].gather(-1, truth).double().sum())
            after -= float(theirs[:, :-1].gather(-1, truth).double().sum())
            predicted += truth.numel()
    return Utility(
        kl / positions, other / positions, _perplexity(after, predicted), _perplexity(before, predicted)
    )


def guessed(model: LanguageModel, ids: Sequence[Sequence[int]], final: Sequence[Tensor]) -> float:
    """The share of tokens that the model's likeliest next token is, behind the true ones: no state needed.

    ``final``: the prompts' states behind the last norm. The first token of a prompt is never guessed.
    """
    right = total = 0
    for some in _batches(ids, model.vocab_size):
        logits = model.logits_from(torch.stack([final[index].to(model.device) for index in some]), "final")
        guess = logits[:, :-1].argmax(dim=-1).cpu()
        truth = torch.tensor([list(ids[index]) for index in some])
        right += int((guess == truth[:, 1:]).sum())
        total += truth.numel()
    return right / total


def _batches(ids: Sequence[Sequence[int]], vocabulary: int) -> Iterator[list[int]]:
    """Prompts of one length, as many as their logits leave room for."""
    for group in group_by_length([len(one) for one in ids]):
        size = max(1, _LOGITS // (group.length * vocabulary))
        prompts = list(group.prompts)
        for start in range(0, len(prompts), size):
            yield prompts[start : start + size]


def _perplexity(loss: float, tokens: int) -> float:
    return math.exp(min(loss / tokens, 700.0)) if tokens else math.nan
