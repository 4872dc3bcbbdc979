"""Training a lens: text and random tokens in, states by the model itself, one cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.errors import OptionError
from preimage.inversion.lens import Lens, LensShape, token_features
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent


@dataclass(frozen=True)
class LensOptions:
    """How a lens is trained. Half of every batch is text (if there is any), half uniformly random tokens."""

    steps: int = 1200
    batch_tokens: int = 6144
    length: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    rank: int = 512
    hidden: int = 2304
    neighbours: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "length", "rank", "hidden"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}.", "Give at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain json types."""
        return asdict(self)


def train_lens(
    model: LanguageModel,
    layer: Layer,
    text: Int[Tensor, " token"],
    options: LensOptions,
    *,
    progress: Progress = silent,
) -> Lens:
    """A lens for one layer, trained on windows of ``text`` and on random tokens.

    Runs where the model runs. The states of a batch are computed by the model as it is trained, so nothing
    but one batch is ever in memory.
    """
    device = model.device
    generator = torch.Generator().manual_seed(options.seed)
    features = token_features(model).clone()
    shape = LensShape(
        model.d_model, model.vocab_size, features.shape[1], options.rank, options.hidden, options.neighbours
    )
    torch.manual_seed(options.seed)
    lens = Lens(shape).to(device)
    batches = _batches(model, text, options, generator)
    _standardise(lens, model, layer, next(batches), _singles(model, options, generator))
    decay = [p for p in lens.parameters() if p.ndim > 1]
    plain = [p for p in lens.parameters() if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": decay, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
    )
    for step in range(options.steps):
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, options.steps)
        keys = lens.keys(features)
        loss = torch.zeros((), device=device)
        for ids, weight in ((next(batches), 0.9), (_singles(model, options, generator), 0.1)):
            states = model.states(ids, (layer,))[layer].clone()
            scores = lens(states, keys)
            loss = loss + weight * nn.functional.cross_entropy(scores.flatten(0, 1), ids.to(device).flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(lens.parameters(), 1.0)
        optimiser.step()
        progress(step + 1, options.steps, "lens steps")
    return lens.eval().requires_grad_(False)


@torch.inference_mode()
def held_out_ranks(
    model: LanguageModel, layer: Layer, lens: Lens, ids: Int[Tensor, "prompt position"]
) -> Float[Tensor, "prompt position"]:
    """The rank of the true token at every position; 0 is the lens's first choice."""
    keys = lens.keys(token_features(model))
    ranks = []
    for batch in ids.split(32):
        scores = lens(model.states(batch, (layer,))[layer], keys)
        true = scores.gather(2, batch.to(scores.device)[..., None])
        ranks.append((scores > true).sum(dim=2).float().cpu())
    return torch.cat(ranks)


def _schedule(step: int, steps: int) -> float:
    warm = max(1, min(100, steps // 10))
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _batches(
    model: LanguageModel, text: Tensor, options: LensOptions, generator: torch.Generator
) -> Iterator[Tensor]:
    """Batches of windows: text and random tokens, half and half."""
    rows = max(2, options.batch_tokens // options.length)
    length = options.length
    with_text = len(text) > length
    while True:
        random = torch.randint(model.vocab_size, (rows, length), generator=generator)
        if with_text:
            starts = torch.randint(len(text) - length, (rows // 2, 1), generator=generator)
            random[: rows // 2] = text[starts + torch.arange(length)]
        yield random


def _singles(model: LanguageModel, options: LensOptions, generator: torch.Generator) -> Tensor:
    """Prompts of one token: the first position is one in ``length`` otherwise, and as hard to name."""
    return torch.randint(model.vocab_size, (options.batch_tokens // 4, 1), generator=generator)


@torch.no_grad()
def _standardise(lens: Lens, model: LanguageModel, layer: Layer, ids: Tensor, singles: Tensor) -> None:
    """Centre and scale of first positions and of all others."""
    first = model.states(singles, (layer,))[layer][:, 0].double()
    others = model.states(ids, (layer,))[layer][:, 1:].flatten(0, 1).double()
    for row, sample in enumerate((first, others)):
        lens.mean[row] = sample.mean(dim=0).float()
        lens.scale[row] = sample.std(dim=0).clamp_min(1e-6 * sample.std()).float()
