"""GGUF files, dequantised by transformers' own reader into an ordinary model.

``from_pretrained(gguf_file=...)`` wants accelerate and marks the model as quantised, which then refuses
``save_pretrained``; reading the state dict into a fresh model of the same config has neither problem.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from preimage.errors import ModelError, first_line


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """Model and tokenizer of a GGUF file, weights dequantised to ``dtype``."""
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        config.name_or_path = path.stem  # the file's own field is whatever its maker called the run
        _require_held(path, config)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        absent = set(model.load_state_dict(tensors, strict=False).missing_keys)
    except Exception as error:  # the readers raise whatever a damaged file makes them trip over
        raise ModelError(
            f"{path} cannot be read as a GGUF model: {first_line(error).rstrip('.')}.",
            "Give an unbroken GGUF file of an architecture transformers reads, or a safetensors folder.",
        ) from error
    model.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if absent - tied:
        raise ModelError(
            f"{path} lacks weights the model needs, {sorted(absent - tied)[0]!r} first.",
            "Download the file again.",
        )
    return model, tokenizer


def _require_held(path: Path, config: Any) -> None:
    """Refuse sizes that the file cannot hold, before a model of these sizes is made."""
    with path.open("rb") as file:
        tensors = int.from_bytes(file.read(16)[8:], "little")
    if not 0 < config.num_hidden_layers <= tensors:
        raise ValueError(f"it has {tensors} tensors for {config.num_hidden_layers} layers")
    most = 8 * path.stat().st_size  # a bit each
    if (getattr(config, "head_dim", None) or 0) > most:  # rotary frequencies take memory on any device
        raise ValueError(f"it is too small for heads of {config.head_dim}")
    with torch.device("meta"):  # which takes no memory
        weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if weights > most:
        raise ValueError(f"it is too small for the {weights} weights of its sizes")


def convert_gguf(source: Path, target: Path) -> None:
    """Write a GGUF model as a folder of float32 safetensors with its tokenizer."""
    model, tokenizer = read_gguf(source)
    model.save_pretrained(target)  # type: ignore[operator]  # PreTrainedModel's
    tokenizer.save_pretrained(target)
