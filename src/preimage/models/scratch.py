"""New models to train: real transformers classes, initialised by transformers under a seed.

Both families come in the same shapes, with tied embeddings and without dropout, so that a GPT-2 and a Llama
of one size have about the same number of parameters and differ in what makes them another family.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from preimage.errors import ModelError, OptionError

if TYPE_CHECKING:
    import torch

    from preimage.models.language_model import LanguageModel

FAMILIES = ("gpt2", "llama")
END_OF_TEXT = "<|endoftext|>"


class Size(NamedTuple):
    """The shape of a model."""

    d_model: int
    n_layers: int
    n_heads: int


SIZES = {
    "tiny": Size(64, 2, 2),
    "small": Size(128, 4, 4),
    "medium": Size(256, 6, 4),
    "large": Size(512, 8, 8),
    "xlarge": Size(768, 12, 12),
}


def parse_size(size: str | tuple[int, ...]) -> Size:
    """A shape from the name of a preset or from (d_model, n_layers, n_heads)."""
    if isinstance(size, str):
        if size not in SIZES:
            raise OptionError(f"Size {size!r} is not known.", f"Use one of {', '.join(SIZES)}.")
        return SIZES[size]
    if len(size) != 3 or not all(isinstance(number, int) and number > 0 for number in size):
        raise OptionError(f"Size is {size!r}.", "Give d_model, n_layers and n_heads, all above 0.")
    shape = Size(*size)
    if shape.d_model % (2 * shape.n_heads):  # rotary positions turn pairs of coordinates
        raise OptionError(
            f"d_model {shape.d_model} does not divide into {shape.n_heads} heads of even width.",
            "Give a d_model that is a multiple of twice the heads.",
        )
    return shape


def new_model(
    family: str,
    size: str | tuple[int, ...] = "small",
    *,
    tokenizer: Any = None,
    vocabulary: int | None = None,
    max_length: int,
    seed: int = 0,
    device: str | torch.device = "auto",
) -> LanguageModel:
    """An untrained model in float32, its weights those of transformers' own initialisation.

    They are drawn on the CPU, so that a seed means the same weights on every device, and the caller's random
    numbers are left alone. Positions go up to ``max_length``. Without a tokenizer there are ``vocabulary``
    token ids, and 0 ends a text.
    """
    import torch

    from preimage.models.language_model import LanguageModel
    from preimage.models.loading import parse_device

    shape, target = parse_size(size), parse_device(device)
    build = {"gpt2": _gpt2, "llama": _llama}.get(family)
    if build is None:
        raise OptionError(f"Family {family!r} is not known.", f"Use one of {', '.join(FAMILIES)}.")
    if tokenizer is not None:
        tokens, end = len(tokenizer), tokenizer.eos_token_id
    elif vocabulary is not None:
        tokens, end = vocabulary, 0
    else:
        raise OptionError("A new model needs a tokenizer or a vocabulary.", "Give one of them.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build(shape, max_length, tokens, end)
    name = f"{family}-{size if isinstance(size, str) else 'x'.join(map(str, shape))}"
    return LanguageModel(module.to(target), tokenizer, name=name)


def save_model(model: LanguageModel, folder: Path) -> Path:
    """Write weights (safetensors), configuration and tokenizer, whole or not at all."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    temporary = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        model.module.save_pretrained(temporary)  # type: ignore[operator]  # PreTrainedModel's
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(temporary)
        temporary.replace(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ModelError(f"{folder} cannot be written: {error.strerror}.", "Give another place.") from error
    return folder


def train_tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> Any:
    """A byte-level BPE tokenizer of at most ``vocabulary`` tokens; the same texts give the same one.

    Every byte is a token, so that any text can be written. ``<|endoftext|>`` is BOS and EOS; as in GPT-2,
    neither is added to a text by itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise OptionError(f"vocabulary is {vocabulary}.", f"Give more than {len(alphabet)}: bytes, and one.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _gpt2(shape: Size, max_length: int, vocabulary: int, end: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary, n_positions=max_length, n_embd=shape.d_model, n_layer=shape.n_layers,
            n_head=shape.n_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end,
            eos_token_id=end,
        )
    )  # fmt: skip


def _llama(shape: Size, max_length: int, vocabulary: int, end: int) -> Any:
    """Three matrices of 8/3 d in the MLP hold what GPT-2's two of 4 d do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, max_position_embeddings=max_length, hidden_size=shape.d_model,
            intermediate_size=8 * round(shape.d_model / 3), num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads, num_key_value_heads=shape.n_heads, tie_word_embeddings=True,
            bos_token_id=end, eos_token_id=end, pad_token_id=None,
        )
    )  # fmt: skip
