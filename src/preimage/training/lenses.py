"""Training a lens: text and random tokens in, states by the model itself, one cross-entropy."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.errors import OptionError
from preimage.inversion.proposers.lens import Lens, LensShape, token_features
from preimage.inversion.proposers.lens_files import save_lens
from preimage.layers import Layer
from preimage.models import LanguageModel
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, Vocabulary, documents, gather
from preimage.storage import Run
from preimage.storage.tensor_file import tensor_bytes
from preimage.training.options import LensOptions
from preimage.training.trainer import Recipe, Trainer, seeded, windows_of

_WEIGHTS = (0.9, 0.1)  # of windows and of prompts of two tokens in the loss


class TrainedLens(NamedTuple):
    """A lens, the shares of held-out tokens by the rank it gives them, and where it was written, if so."""

    lens: Lens
    held_out: dict[str, dict[str, float]]
    path: Path | None


def train_lens(
    model: LanguageModel,
    layer: Layer,
    text: str | Int[Tensor, " token"] = "default",
    options: LensOptions | None = None,
    *,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> TrainedLens:
    """A lens for one layer, trained on windows of a text and on random tokens, and measured on held-out ones.

    ``text``: token ids; "default" (the training split of the default corpus), "random" (no text at all), or
    any other source of :func:`preimage.gather`. Runs where the model runs. The states of a batch are computed
    by the model as the lens is trained, so nothing but one batch is ever in memory. With ``out`` the lens is
    written to that file; until it is, the training is kept beside it, and calling again continues it.
    Cost: ``steps`` passes over ``batch_tokens`` tokens, forward through the model and both ways through the
    lens; about 10 minutes on a GPU, hours on a CPU.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", "tiny", vocabulary=300, max_length=32)
    >>> small = preimage.LensOptions(steps=2, batch_tokens=64, length=8, rank=8, hidden=16)
    >>> preimage.train_lens(model, 1, "random", small).held_out.keys()
    dict_keys(['random'])
    """
    chosen = options or LensOptions()
    chosen = replace(chosen, length=min(chosen.length, model.max_length or chosen.length))
    tokens = training_text(model, text) if isinstance(text, str) else text
    plan = {
        "command": "lens train",
        "layer": layer,
        "model": model.identity.weight_hash,
        "options": chosen.to_dict(),
        "text": sha256(tensor_bytes(tokens)).hexdigest(),
    }
    path = None if out is None else Path(out)
    run = Run(plan, path and path.with_name(path.name + ".training"))
    trained = TrainedLens(_train(model, layer, tokens, chosen, run, progress), {}, path)
    trained = trained._replace(held_out=held_out(model, layer, trained.lens))
    if path is not None:
        about = chosen.to_dict() | {"text": text if isinstance(text, str) else "token ids"}
        save_lens(trained.lens, path, layer=layer, model=model, training=about, ranks=trained.held_out)
    run.discard()
    return trained


def _train(
    model: LanguageModel,
    layer: Layer,
    text: Int[Tensor, " token"],
    options: LensOptions,
    run: Run,
    progress: Progress,
) -> Lens:
    features = token_features(model).clone()
    shape = LensShape(
        model.d_model, model.vocab_size, features.shape[1], options.rank, options.hidden, options.neighbours
    )
    torch.manual_seed(options.seed)
    lens = Lens(shape).to(model.device)
    windows, pairs = _batch(model, text, options, step=-1)
    lens.standardise.fit(model.states(windows, (layer,))[layer], model.states(pairs, (layer,))[layer])

    def loss(step: int) -> Float[Tensor, ""]:
        keys = lens.keys(features)
        total = torch.zeros((), device=model.device)
        for ids, weight in zip(_batch(model, text, options, step), _WEIGHTS, strict=True):
            states = model.states(ids, (layer,))[layer].clone()
            scores = lens(states, keys).flatten(0, 1)
            total = total + weight * nn.functional.cross_entropy(scores, ids.to(scores.device).flatten())
        return total

    # tf32: what a lens proposes is verified in full precision anyway
    recipe = Recipe(options.steps, options.learning_rate, 0.02, options.weight_decay, (0.9, 0.98), tf32=True)
    Trainer(lens, loss, recipe, run.place("training.safetensors")).advance(options.steps, progress)
    return lens.eval().requires_grad_(False)


def training_text(model: LanguageModel, source: str) -> Int[Tensor, " token"]:
    """Token ids to train on: the default corpus (its train split), a user's source, or none at all."""
    if source == "random":
        return torch.empty(0, dtype=torch.long)
    if model.tokenizer is None:
        raise OptionError("Without a tokenizer a lens learns from random tokens alone.", "Use random.")
    if source != "default":
        prompts = gather(source, Vocabulary(model.tokenizer, model.vocab_size, None), PromptOptions())
        return torch.tensor([token for ids in prompts for token in ids])
    prose, code = (
        [token for _, text in documents(kind, "train") for token in model.tokenizer(text)["input_ids"]]
        for kind in ("prose", "code")
    )
    return torch.tensor(prose * max(1, len(code) // max(1, len(prose))) + code)  # as much of each


def held_out(model: LanguageModel, layer: Layer, lens: Lens, count: int = 24) -> dict[str, dict[str, float]]:
    """Ranks on prompts the training never saw: prose and code of the test split, and random tokens."""
    text = {} if model.tokenizer is None else {"prose": "default:prose", "code": "default:code"}
    sources = {**text, "random": "random"}
    options = PromptOptions(count=count, length=min(64, model.max_length or 64), seed=5)
    shares: dict[str, dict[str, float]] = {}
    for name, source in sources.items():
        ids = torch.tensor(list(gather(source, model, options)))
        shares[name] = summarise(held_out_ranks(model, layer, lens, ids))
    return shares


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


def _batch(model: LanguageModel, text: Tensor, options: LensOptions, step: int) -> tuple[Tensor, Tensor]:
    """Windows (half text, half random tokens) and prompts of two tokens, of one step.

    The first positions are few of a window's tokens and, as attention sinks, as hard to name as all others
    together, hence the prompts of two tokens.
    """
    generator = seeded(options.seed, step + 1)
    rows, length = max(2, options.batch_tokens // options.length), options.length
    windows = torch.randint(model.vocab_size, (rows, length), generator=generator)
    if len(text) > length:
        windows[: rows // 2] = windows_of(text, rows // 2, length, generator)
    pairs = torch.randint(model.vocab_size, (max(2, options.batch_tokens // 8), 2), generator=generator)
    return windows, pairs
