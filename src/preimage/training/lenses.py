"""Training a lens: text and random tokens in, states by the model itself, one cross-entropy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.distances import products
from preimage.errors import OptionError
from preimage.inversion.proposers.lens import Lens, LensShape, token_features
from preimage.inversion.proposers.lens_files import load_checkpoint, save_checkpoint
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, documents, gather

_WEIGHTS = (0.9, 0.1)  # of windows and of prompts of two tokens in the loss
_CHECKPOINT_STEPS = 100


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
    checkpoint: Path | None = None,
    progress: Progress = silent,
) -> Lens:
    """A lens for one layer, trained on windows of ``text`` and on random tokens.

    Runs where the model runs. The states of a batch are computed by the model as it is trained, so nothing
    but one batch is ever in memory. With ``checkpoint`` the training is saved there from time to time, and
    calling again with the same options continues it; every step draws from a seed of its own, so a continued
    training sees the batches an uninterrupted one would have seen.
    """
    features = token_features(model).clone()
    shape = LensShape(
        model.d_model, model.vocab_size, features.shape[1], options.rank, options.hidden, options.neighbours
    )
    torch.manual_seed(options.seed)
    lens = Lens(shape).to(model.device)
    windows, pairs = _batch(model, text, options, step=-1)
    lens.standardise.fit(model.states(windows, (layer,))[layer], model.states(pairs, (layer,))[layer])
    optimiser = _optimiser(lens, options)
    plan = {"layer": layer, "model": model.identity.weight_hash, "options": options.to_dict()}
    start = 0 if checkpoint is None else load_checkpoint(checkpoint, lens, optimiser, plan)
    with products("tf32"):  # on a GPU; what a lens proposes is verified in full precision anyway
        for step in range(start, options.steps):
            for group in optimiser.param_groups:
                group["lr"] = options.learning_rate * _schedule(step, options.steps)
            keys = lens.keys(features)
            loss = torch.zeros((), device=model.device)
            for ids, weight in zip(_batch(model, text, options, step), _WEIGHTS, strict=True):
                states = model.states(ids, (layer,))[layer].clone()
                scores = lens(states, keys).flatten(0, 1)
                loss = loss + weight * nn.functional.cross_entropy(scores, ids.to(scores.device).flatten())
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(lens.parameters(), 1.0)
            optimiser.step()
            if checkpoint is not None and (step + 1) % _CHECKPOINT_STEPS == 0:
                save_checkpoint(checkpoint, lens, optimiser, plan, step + 1)
            progress(step + 1, options.steps, "lens steps")
    return lens.eval().requires_grad_(False)


def training_text(model: LanguageModel, source: str) -> Int[Tensor, " token"]:
    """Token ids to train on: the default corpus (its train split), a user's source, or none at all."""
    if source == "random":
        return torch.empty(0, dtype=torch.long)
    if model.tokenizer is None:
        raise OptionError("Without a tokenizer a lens learns from random tokens alone.", "Use random.")
    if source != "default":
        limits: dict[str, Any] = {"vocab_size": model.vocab_size, "max_length": None}
        found = gather(source, model.tokenizer, PromptOptions(), **limits)
        return torch.tensor([token for ids in found for token in ids])
    prose, code = (
        [token for _, text in documents(kind, "train") for token in model.tokenizer(text)["input_ids"]]
        for kind in ("prose", "code")
    )
    return torch.tensor(prose * max(1, len(code) // max(1, len(prose))) + code)  # as much of each


def held_out(model: LanguageModel, layer: Layer, lens: Lens, count: int = 24) -> dict[str, dict[str, float]]:
    """Ranks on prompts the training never saw: prose and code of the test split, and random tokens."""
    limits: dict[str, Any] = {"vocab_size": model.vocab_size, "max_length": model.max_length}
    sources = {"prose": "default:prose", "code": "default:code", "random": "random"}
    if model.tokenizer is None:
        sources = {"random": "random"}
    options = PromptOptions(count=count, length=min(64, model.max_length or 64), seed=5)
    found: dict[str, dict[str, float]] = {}
    for name, source in sources.items():
        ids = torch.tensor(list(gather(source, model.tokenizer, options, **limits)))
        found[name] = summarise(held_out_ranks(model, layer, lens, ids))
    return found


def summarise(ranks: Float[Tensor, "prompt position"]) -> dict[str, float]:
    """Shares of tokens the lens names first, within 8 and within 64; the first position apart."""
    others = ranks[:, 1:] if ranks.shape[1] > 1 else ranks
    return {
        "rank0": float((others < 1).float().mean()),
        "within8": float((others < 8).float().mean()),
        "within64": float((others < 64).float().mean()),
        "worst": float(others.max()),
        "first": float((ranks[:, 0] < 1).float().mean()),
    }


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


def _batch(model: LanguageModel, text: Tensor, options: LensOptions, step: int) -> tuple[Tensor, Tensor]:
    """Windows (half text, half random tokens) and prompts of two tokens, of one step.

    The first positions are few of a window's tokens and, as attention sinks, as hard to name as all others
    together, hence the prompts of two tokens.
    """
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step + 1)
    rows, length = max(2, options.batch_tokens // options.length), options.length
    windows = torch.randint(model.vocab_size, (rows, length), generator=generator)
    if len(text) > length:
        starts = torch.randint(len(text) - length, (rows // 2, 1), generator=generator)
        windows[: rows // 2] = text[starts + torch.arange(length)]
    pairs = torch.randint(model.vocab_size, (max(2, options.batch_tokens // 8), 2), generator=generator)
    return windows, pairs


def _optimiser(lens: Lens, options: LensOptions) -> torch.optim.AdamW:
    decayed = [p for p in lens.parameters() if p.ndim > 1]
    plain = [p for p in lens.parameters() if p.ndim == 1]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98))
