"""What is trained on: text a model writes, a corpus, or a user's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from preimage.errors import OptionError, RunFolderError
from preimage.models import LanguageModel, model_as_told, rows_at_once, told_model, written_by
from preimage.progress import Progress, silent
from preimage.prompts import PromptOptions, Vocabulary, documents, gather
from preimage.prompts.prompt_set import check_whole
from preimage.storage import Errand, Run, current_workers
from preimage.storage.places import on_a_disk
from preimage.storage.shelf import Shelf
from preimage.storage.tensor_file import pack, unpack
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
    return _written(model, options.sampled_tokens or 1, length, options.seed, run, progress)


def texts_written_by(
    model: LanguageModel,
    tokens: int,
    *,
    length: int = 256,
    seed: int = 0,
    out: str | Path | None = None,
    progress: Progress = silent,
) -> list[str]:
    """About so many tokens of text as a model writes it, in documents of ``length`` tokens.

    Each begins with a random token, drawn at temperature 1; tokens that control a chat are left out. To train
    another model on: what can be had where no corpus can. With ``out`` the run folder keeps every piece, and
    calling again continues or reads it. Cost: a pass over so many tokens; 20 million take some minutes on a
    GPU, and two cores write about a thousand in a second.
    """
    check_whole("tokens", tokens, at_least=1)
    check_whole("length", length, at_least=2)
    if model.tokenizer is None:
        raise OptionError(f"{model.name} has no tokenizer to write text with.", "Use a model with one.")
    if model.unembedding is None:
        raise OptionError(f"{model.name} has no LM head to write text with.", "Use a model with one.")
    length = min(length, model.max_length or length)
    plan = {"command": "text", "model": model.weight_hash, "tokens": tokens, "length": length, "seed": seed}
    run = Run(plan, None if out is None else on_a_disk(out, "text to train on"))
    rows = _written(model, tokens, length, seed, run, progress)
    run.finish(lambda: {"rows": len(rows), "length": length}, {})
    return [str(model.tokenizer.decode(row, skip_special_tokens=True)) for row in rows.tolist()]


def _written(
    model: LanguageModel, tokens: int, length: int, seed: int, run: Run, progress: Progress
) -> Int[Tensor, "row token"]:
    """Rows of about so many tokens in all, piece by piece, here or by workers; what a run kept is read."""
    rows = -(-tokens // length)
    size = rows_at_once(model, length)
    keys = [f"{first}-{min(size, rows - first)}" for first in range(0, rows, size)]
    sampler, shelf = Sampler(model, length, seed), run.shelf
    held: dict[str, Int[Tensor, "row token"]] = {}

    def write(some: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        for key in some:
            held[key] = sampler.write(key)
            yield {} if shelf is None else sampler.put(shelf, key, held[key])

    errand = None
    if current_workers() is not None:
        told = {"model": told_model(model), "length": length, "seed": seed}
        errand = Errand(SampleJob.NAME, told, here_too=True)

    def in_tokens(done: int, total: int, note: str) -> None:
        progress(min(done * size, rows) * length, rows * length, note)

    kept = run.each(keys, dict, write, in_tokens, "tokens sampled", errand=errand)
    for key in keys:
        if key not in held and shelf is not None:
            there = sampler.get(shelf, key, kept[key])
            held[key] = sampler.write(key) if there is None else there
    return torch.cat([held[key] for key in keys])


class Sampler:
    """Text in pieces, each of its own seed: ``first-count`` are so many rows from the first on."""

    def __init__(self, model: LanguageModel, length: int, seed: int) -> None:
        self._model, self._length, self._seed = model, length, seed

    def write(self, key: str) -> Int[Tensor, "row token"]:
        """What the model writes of a piece."""
        first, count = map(int, key.split("-"))
        seed = self._seed * 1_000_003 + _APART + first
        ids = written_by(self._model, count, self._length, seed, start="random")
        assert ids is not None, "the model has an LM head"
        return ids

    def put(self, shelf: Shelf, key: str, ids: Int[Tensor, "row token"]) -> dict[str, Any]:
        """Keep a piece on a shelf; what is to be noted of it."""
        content = pack({"ids": ids})
        shelf.put(_name(key), content)
        return {"sha256": sha256(content).hexdigest()}

    def get(self, shelf: Shelf, key: str, noted: dict[str, Any]) -> Int[Tensor, "row token"] | None:
        """A piece from a shelf; None where it is not what was noted: it can be written again."""
        try:
            content = shelf.get(_name(key), 0, None)
        except RunFolderError:
            return None
        return unpack(content)["ids"] if sha256(content).hexdigest() == noted.get("sha256") else None


class SampleJob:
    """Has a worker's model write pieces of text."""

    NAME = "preimage.training.lens_text:SampleJob"

    def __init__(self, sampler: Sampler, shelf: Shelf) -> None:
        self._sampler, self._shelf = sampler, shelf

    @classmethod
    def made(cls, spec: dict[str, Any], attached: bytes, shelf: Shelf) -> SampleJob:
        """One that works on this machine's own copy of the model."""
        return cls(Sampler(model_as_told(spec["model"]), spec["length"], spec["seed"]), shelf)

    def do(self, keys: Sequence[str], inputs: bytes) -> list[Any]:
        """Pieces, put on the shelf."""
        return [self._sampler.put(self._shelf, key, self._sampler.write(key)) for key in keys]


def _name(key: str) -> str:
    return f"sampled-{key}.safetensors"


def _nothing() -> Int[Tensor, " token"]:
    return torch.empty(0, dtype=torch.long)
