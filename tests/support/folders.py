"""Tiny models with a real tokenizer, as ``save_pretrained`` writes them."""

from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from support.tiny import build

VOCABULARY = 300


def make_tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A real byte-level BPE, trained here, whose ids all fit a tiny model's vocabulary."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([topics[key] for key in sorted(topics)[:5]], trainer)
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=128
    )


def make_folder(folder: Path, *, seed: int = 0, tokenizer: bool = True, **changes: object) -> Path:
    """A tiny llama as ``save_pretrained`` writes it."""
    build("llama", seed, **({"vocab_size": VOCABULARY} | changes)).save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder
