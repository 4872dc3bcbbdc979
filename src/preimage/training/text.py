"""What a model is trained on and what it is measured on, apart from each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from preimage.errors import PromptError
from preimage.models import train_tokenizer
from preimage.prompts import PromptOptions, PromptSet, Vocabulary, documents, gather
from preimage.prompts.tokens import text_ids
from preimage.storage.tensor_file import tensor_bytes
from preimage.training.options import TrajectoryOptions

_HELD_OUT_SHARE = 4  # one part in so many
_HELD_OUT_TOKENS = 8192
_SAME = 0  # probes do not follow a run's seed: runs are compared on the same ones


@dataclass(frozen=True)
class TrainingText:
    """Tokens to train on, windows for the held-out loss and probes; the tokenizer saw the first alone."""

    tokenizer: Any
    train: Int[Tensor, " token"]
    held_out: Int[Tensor, "window position"]
    probes: PromptSet

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens trained on."""
        return hashlib.sha256(tensor_bytes(self.train)).hexdigest()


def prepare_text(texts: Sequence[str] | None, options: TrajectoryOptions) -> TrainingText:
    """The default corpus by its own split, as much prose as code; or given texts, the last quarter held out.

    The tokenizer is trained on the training split. Cost: about ten seconds for the default corpus.
    """
    if texts is None:
        tokenizer, train = _default_corpus(options.vocabulary)
        source: Any = "default"
    else:
        before, after = _split(texts)
        tokenizer = train_tokenizer(before, options.vocabulary)
        train = _stream(before, tokenizer)
        source = [_stream(after, tokenizer).tolist()]
    if len(train) < options.window:
        raise PromptError(
            f"The text to train on has {len(train)} tokens, fewer than a window of {options.window}.",
            "Give more text, or a smaller window.",
        )
    windows = max(1, min(64, _HELD_OUT_TOKENS // options.window))
    held_out = _windows(source, tokenizer, windows, options.window)
    probes = _windows(source, tokenizer, options.probes, options.length)
    if len(probes) < options.probes:
        raise PromptError(
            f"The text held out has {len(probes)} probes of {options.length} tokens, not {options.probes}.",
            "Give more text, or ask for fewer or shorter probes.",
        )
    return TrainingText(tokenizer, train, torch.tensor(held_out.ids), probes)


@lru_cache(maxsize=1)
def _default_corpus(vocabulary: int) -> tuple[Any, Int[Tensor, " token"]]:
    """A tokenizer and the tokens to train on, the same for every run of a process."""
    prose, code = ([text for _, text in documents(kind, "train")] for kind in ("prose", "code"))
    tokenizer = train_tokenizer(prose + code, vocabulary)
    first, second = _stream(prose, tokenizer), _stream(code, tokenizer)
    return tokenizer, torch.cat([first.repeat(max(1, len(second) // max(1, len(first)))), second])


def _split(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The first three quarters of all characters, and the last; a text across the border is cut in two."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise PromptError(
            "The texts to train on are not a list of texts.", "Give a list, one text a document."
        )
    total = sum(map(len, texts))
    left = total - total // _HELD_OUT_SHARE
    before, after = [], []
    for text in texts:
        before.append(text[:left])
        after.append(text[left:])
        left = max(0, left - len(text))
    return [text for text in before if text], [text for text in after if text]


def _stream(texts: Iterable[str], tokenizer: Any) -> Int[Tensor, " token"]:
    """The tokens of all texts, each after an end-of-text token."""
    tokens: list[int] = []
    for number, text in enumerate(texts):
        tokens.append(tokenizer.bos_token_id)
        tokens.extend(text_ids(text, tokenizer, add_special_tokens=False, name=f"text {number}"))
    return torch.tensor(tokens, dtype=torch.long)


def _windows(source: Any, tokenizer: Any, count: int, length: int) -> PromptSet:
    options = PromptOptions(count=count, length=length, seed=_SAME, bos=False)
    return gather(source, Vocabulary(tokenizer, len(tokenizer), None), options)
