"""Training a lens: text and random tokens in, states by the model itself, one cross-entropy."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from preimage.devices import by_device
from preimage.errors import OptionError
from preimage.inversion.proposers.features import features_for, features_width
from preimage.inversion.proposers.lens import Lens, LensShape
from preimage.inversion.proposers.lens_files import find_lenses, save_lens, told
from preimage.inversion.proposers.registry import can_be_peeled
from preimage.layers import parse_layer
from preimage.models import LanguageModel, in_bfloat16, require_model, without_positions
from preimage.observations import Observation, Site, Tap, in_words
from preimage.progress import Listener, Progress, reporting, silent
from preimage.prompts import PromptOptions, gather
from preimage.storage import Run
from preimage.storage.places import on_a_disk
from preimage.storage.tensor_file import tensor_bytes
from preimage.training.lens_text import own_text, training_text
from preimage.training.options import LensOptions
from preimage.training.trainer import Recipe, Trainer, seeded, windows_of

_SAMPLED_TOKENS = {"cpu": 100_000, "cuda": 4_000_000}
_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
_STEP = 3  # passes of a batch that a step costs: forward through the model, both ways through the lens
_WORTH = 1 / 8  # of what a training costs, in tokens of a forward pass, that there must be to invert
_SIZES = ("rank", "hidden", "neighbours", "key_hidden", "prior")
_NEAR_TOP = 0.75  # of the blocks, from which on a lens takes in what the model expects
_WEIGHTS = (0.9, 0.1)  # of windows and of prompts of two tokens in the loss


class TrainedLens(NamedTuple):
    """A lens, the shares of held-out tokens by the rank it gives them, and where it was written, if so."""

    lens: Lens
    held_out: dict[str, dict[str, float]]
    path: Path | None


def train_lens(
    model: LanguageModel,
    tap: Tap,
    text: str | Int[Tensor, "*row token"] = "self",
    options: LensOptions | None = None,
    *,
    out: str | Path | None = None,
    progress: Listener = silent,
) -> TrainedLens:
    """A lens for one layer or site, trained on text and random tokens and measured on held-out ones.

    ``tap``: a layer, or a ``Site`` inside a block: ``Site(15, "keys")``. Keys are learned before rotary
    positions, and serve for those after. ``text``: "self" (what the model itself writes, begun by random
    tokens), "default" (the training split of the default corpus), "random" (no text at all), any other source
    of :func:`preimage.gather`, or token ids, of one text or of a text a row. Runs where the model runs. The
    states of a batch are computed by the model as the lens is trained, so nothing but one batch is ever in
    memory. With ``out`` the lens is written to that file; until it is, the training and its text are kept
    beside it, and calling again continues it. Cost: ``steps`` passes over ``batch_tokens`` tokens, forward
    through the model and both ways through the lens; about 3 minutes on an H200, hours on a CPU.

    >>> import preimage
    >>> model = preimage.models.new_model("llama", "tiny", vocabulary=300, max_length=32)
    >>> small = preimage.LensOptions(steps=2, batch_tokens=64, length=8, rank=8, hidden=16)
    >>> preimage.train_lens(model, 1, "random", small).held_out.keys()
    dict_keys(['random'])
    """
    require_model(model)
    at = without_positions(model, _checked(tap, model.n_layers))
    chosen = _settled(options or LensOptions(), model, at, text)
    given = text if isinstance(text, Tensor) else training_text(model, text)
    if given is not None and 0 < given.shape[-1] < chosen.length:
        raise OptionError(
            f"The text has {given.shape[-1]} tokens, fewer than a window of {chosen.length}.",
            "Give more text, or a smaller length.",
        )
    plan = {
        "command": "lens train",
        **told(at),
        "model": model.weight_hash,
        "options": chosen.to_dict(),
        "text": "self" if given is None else sha256(tensor_bytes(given)).hexdigest(),
    }
    path = None if out is None else on_a_disk(out, "a lens")
    run = Run(plan, path and path.with_name(path.name + ".training"))
    with reporting(progress) as report:
        tokens = own_text(model, chosen, run, report) if given is None else given
        lens = _train(model, at, tokens, chosen, run, report)
    trained = TrainedLens(lens, held_out(model, at, lens), path)
    if path is not None:
        source = "token ids" if isinstance(text, Tensor) else text
        about = chosen.to_dict() | {"text": source if tokens.numel() else "random"}
        save_lens(lens, path, tap=at, model=model, training=about, ranks=trained.held_out)
    run.discard()
    return trained


def is_worth_training(model: LanguageModel, tap: Tap, tokens: int) -> bool:
    """Whether a lens should be trained before prompts of so many tokens in all are inverted from a tap.

    It should where there is none, blocks cannot be undone down to the tokens, and they are no fewer than an
    eighth of the tokens it costs to train one: without a lens a prompt costs some ten passes more, near the
    top of a model far more.
    """
    if tokens < _WORTH * training_tokens(model, tap) or find_lenses(model, tap):
        return False
    return not can_be_peeled(model, tap)


def training_tokens(model: LanguageModel, tap: Tap) -> int:
    """What training a lens by default costs, in tokens of a forward pass."""
    chosen = _settled(LensOptions(), model, tap, "self")
    return (chosen.sampled_tokens or 0) + _STEP * chosen.steps * (chosen.batch_tokens or 0)


def _checked(tap: Tap, n_layers: int) -> Tap:
    """A tap the model has."""
    if isinstance(tap, Site):
        return Observation(tap.kind, tap.rotary).tap(tap.block, n_layers)
    return parse_layer(tap, n_layers)


def _settled(options: LensOptions, model: LanguageModel, tap: Tap, text: str | Tensor) -> LensOptions:
    """The options with what depends on the model and the place: no window is longer than it allows."""
    own = isinstance(text, str) and text == "self"
    tokens = options.sampled_tokens or by_device(_SAMPLED_TOKENS, model.device)
    length = min(options.length, model.max_length or options.length)
    can = not isinstance(tap, Site) and model.unembedding is not None
    if options.prior and not can:
        raise OptionError(
            f"What the model expects is not known from {in_words(tap)}.", "Leave the prior out."
        )
    high = tap == "final" or (not isinstance(tap, Site) and tap >= _NEAR_TOP * model.n_layers)
    prior = can and high if options.prior is None else options.prior
    batch = options.batch_tokens or by_device(_BATCH_TOKENS, model.device)
    return replace(
        options, length=length, batch_tokens=batch, sampled_tokens=tokens if own else None, prior=prior
    )


def _train(
    model: LanguageModel,
    tap: Tap,
    text: Int[Tensor, "*row token"],
    options: LensOptions,
    run: Run,
    progress: Progress,
) -> Lens:
    sizes = {name: int(getattr(options, name)) for name in _SIZES}
    width = features_width(model, options.key_hidden)
    shape = LensShape(model.width(tap), model.vocab_size, width, **sizes)
    features = features_for(model, shape).clone()
    torch.manual_seed(options.seed)
    lens = Lens(shape).to(model.device)
    windows, pairs = _batch(model, text, options, step=-1)
    lens.standardise.fit(*(model.states(ids, (tap,))[tap] for ids in (windows, pairs)))

    def loss(step: int) -> Float[Tensor, ""]:
        batch = [ids.to(model.device) for ids in _batch(model, text, options, step)]
        seen = [_seen(model, tap, lens, ids) for ids in batch]
        total = torch.zeros((), device=model.device)
        with in_bfloat16(model.device):  # the lens alone: it learns from states as they are
            keys = lens.keys(features)
            for ids, (states, before), weight in zip(batch, seen, _WEIGHTS, strict=True):
                scores = lens(states, keys, _expected(model, before)).flatten(0, 1)
                total = total + weight * nn.functional.cross_entropy(scores, ids.flatten())
        return total

    # tf32: what a lens proposes is verified in full precision anyway
    recipe = Recipe(options.steps, options.learning_rate, 0.02, options.weight_decay, (0.9, 0.98), tf32=True)
    Trainer(lens, loss, recipe, run.place("training.safetensors")).advance(options.steps, progress)
    return lens.eval().requires_grad_(False)


def _seen(
    model: LanguageModel, tap: Tap, lens: Lens, ids: Int[Tensor, "prompt position"]
) -> tuple[Float[Tensor, "prompt position d"], Float[Tensor, "prompt position d_model"] | None]:
    """What a lens reads of prompts and, where it counts, the state before each position under the LM head."""
    if not lens.shape.prior:
        return model.states(ids, (tap,))[tap].clone(), None
    taps: tuple[Tap, ...] = tuple(dict.fromkeys((tap, "final")))
    states = model.states(ids, taps)
    return states[tap].clone(), nn.functional.pad(states["final"], (0, 0, 1, 0))[:, :-1].clone()


def _expected(
    model: LanguageModel, before: Float[Tensor, "prompt position d_model"] | None
) -> Float[Tensor, "prompt position vocabulary"] | None:
    """The model's logits for every position, behind the states before it."""
    table = model.unembedding
    return None if before is None or table is None else before.to(table) @ table.T


def held_out(model: LanguageModel, tap: Tap, lens: Lens, count: int = 24) -> dict[str, dict[str, float]]:
    """Ranks on prompts the training never saw: prose and code of the test split, and random tokens."""
    text = {} if model.tokenizer is None else {"prose": "default:prose", "code": "default:code"}
    sources = {**text, "random": "random"}
    options = PromptOptions(count=count, length=min(64, model.max_length or 64), seed=5)
    shares: dict[str, dict[str, float]] = {}
    for name, source in sources.items():
        ids = torch.tensor(list(gather(source, model, options)))
        shares[name] = summarise(held_out_ranks(model, tap, lens, ids))
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
    model: LanguageModel, tap: Tap, lens: Lens, ids: Int[Tensor, "prompt position"]
) -> Float[Tensor, "prompt position"]:
    """The rank of the true token at every position; 0 is the lens's first choice."""
    keys = lens.keys(features_for(model, lens.shape))
    ranks = []
    for batch in ids.split(32):
        states, before = _seen(model, tap, lens, batch)
        scores = lens(states, keys, _expected(model, before))
        true = scores.gather(2, batch.to(scores.device)[..., None])
        ranks.append((scores > true).sum(dim=2).float().cpu())
    return torch.cat(ranks)


def _batch(
    model: LanguageModel, text: Int[Tensor, "*row token"], options: LensOptions, step: int
) -> tuple[Int[Tensor, "window position"], Int[Tensor, "pair two"]]:
    """Windows (half text, a quarter mixed, a quarter random tokens) and prompts of two tokens, of one step.

    A mixed window is text of which any share is replaced by random tokens. The first positions are few of a
    window's tokens and, as attention sinks, as hard to name as all others together, hence the prompts of two
    tokens.
    """
    generator = seeded(options.seed, step + 1)
    batch, length = options.batch_tokens or 0, options.length
    rows = max(2, batch // length)
    windows = torch.randint(model.vocab_size, (rows, length), generator=generator)
    if text.shape[-1] >= length:
        half, written = rows // 2, rows // 2 + rows // 4
        texts = windows_of(text, written, length, generator)
        share = torch.rand(written, 1, generator=generator)
        share[:half] = 0
        replaced = torch.rand(written, length, generator=generator) < share
        windows[:written] = torch.where(replaced, windows[:written], texts)
    pairs = torch.randint(model.vocab_size, (max(2, batch // 8), 2), generator=generator)
    return windows, pairs
