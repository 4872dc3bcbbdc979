"""What a lens is trained on: text the model writes itself, a corpus, or a user's own."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from preimage.errors import OptionError
from preimage.models import LanguageModel, rows_at_once, written_by
from preimage.progress import Progress
from preimage.prompts import PromptOptions, Vocabulary, documents, gather
from preimage.storage import Run, write_tensors
from preimage.training.options import LensOptions

log = logging.getLogger(__name__)

_ROW = 128  # tokens the model writes at a time
_APART = 2**40  # from the seeds of the steps of a training


def training_text(model: LanguageModel, source: str) -> Int[Tensor, " token"] | None:
    """Token ids to train on: the default corpus (its train split), a user's source, none at all ("random").

    None for "self": the model is yet to write it, by :func:`own_text`.
    """
    if source == "self":
        return None
    if source == "random":
        return _nothing()
    if model.tokenizer is None:
        raise OptionError(
            "Without a tokenizer a lens learns from the model's own text or random tokens.",
            "Use self or random.",
        )
    if source != "default":
        prompts = gather(source, Vocabulary(model.tokenizer, model.vocab_size, None), PromptOptions())
        return torch.tensor([token for ids in prompts for token in ids])
    prose, code = (
        [token for _, text in documents(kind, "train") for token in model.tokenizer(text)["input_ids"]]
        for kind in ("prose", "code")
    )
    return torch.tensor(prose * max(1, len(code) // max(1, len(prose))) + code)  # as much of each


def own_text(
    model: LanguageModel, options: LensOptions, run: Run, progress: Progress
) -> Int[Tensor, "*row token"]:
    """Texts the model writes, each begun by a random token; nothing where it has no LM head.

    What is written is kept in the run's folder, piece by piece, and not written again.
    """
    if model.unembedding is None:
        log.warning("%s has no LM head to write text with: its lens learns from random tokens", model.name)
        return _nothing()
    length = min(max(_ROW, options.length), model.max_length or max(_ROW, options.length))
    rows = -(-(options.sampled_tokens or 1) // length)
    size = rows_at_once(model, length)
    pieces = []
    for first in range(0, rows, size):
        progress(first * length, rows * length, "tokens sampled")
        count = min(size, rows - first)
        place = run.place(f"sampled-{first}-{count}.safetensors")
        pieces.append(_kept(place, model, (count, length), options.seed * 1_000_003 + _APART + first))
    progress(rows * length, rows * length, "tokens sampled")
    return torch.cat(pieces)


def _kept(
    place: Path | None, model: LanguageModel, shape: tuple[int, int], seed: int
) -> Int[Tensor, "row token"]:
    """One piece, from the folder or written now and put there."""
    if place is not None:
        with suppress(OSError, SafetensorError, KeyError):  # none there, or none that can be read
            return load_file(place)["ids"]
    ids = written_by(model, *shape, seed, start="random")
    assert ids is not None, "the model has an LM head"
    if place is not None:
        write_tensors(place, {"ids": ids})
    return ids


def _nothing() -> Int[Tensor, " token"]:
    return torch.empty(0, dtype=torch.long)
