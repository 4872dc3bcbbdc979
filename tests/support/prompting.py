"""A tokenizer of the tests' own, and prompts gathered for a model of its vocabulary."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from preimage.prompts import PromptOptions, Vocabulary, encode, gather

VOCAB = 600
BOS = 0


def make_tokenizer(*, bos: bool, adds_bos: bool) -> PreTrainedTokenizerFast:
    """A real byte-level BPE, trained here; token 0 is ``<s>``."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([topics[key] for key in sorted(topics)[:20]], trainer)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>" if bos else None, model_max_length=128
    )


def collect(source: Any, tokenizer: Any = None, max_length: int | None = None, **options: Any):
    return gather(source, Vocabulary(tokenizer, VOCAB, max_length), PromptOptions(**options))


def one(prompt: Any, tokenizer: Any = None, **given: Any) -> tuple[int, ...]:
    return encode(prompt, tokenizer, **{"vocab_size": VOCAB, "max_length": None, **given})


class Counted:
    """An iterable that counts how far it was read."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.read = 0

    def __iter__(self):
        for item in self.items:
            self.read += 1
            yield item
