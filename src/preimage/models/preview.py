"""What can be known of a model before its weights are read, so that bad input is refused in a moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preimage.errors import ModelError
from preimage.models.loading import locate, read_tokenizer


@dataclass(frozen=True)
class ModelPreview:
    """A model's sizes and tokenizer, from its config alone."""

    n_layers: int
    vocab_size: int
    max_length: int | None
    d_model: int
    tokenizer: Any


def preview(name: str, revision: str | None = None) -> ModelPreview | None:
    """Sizes and tokenizer of a named model; None for a GGUF file, whose header is as slow as the rest."""
    path, _ = locate(name, revision)
    if path.is_file():
        return None
    return _from_config(path)


def _from_config(folder: Path) -> ModelPreview:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        text = config.get_text_config(decoder=True)
        return ModelPreview(
            n_layers=int(text.num_hidden_layers),
            vocab_size=int(text.vocab_size),
            max_length=getattr(text, "max_position_embeddings", None),
            d_model=int(text.hidden_size),
            tokenizer=read_tokenizer(folder),
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"The config in {folder} cannot be used: {reason}",
            "Give a folder of a decoder-only transformers model.",
        ) from error
