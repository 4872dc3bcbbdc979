"""What can be known of a model before its weights are read, so that bad input is refused in a moment.

Neither torch nor transformers is imported: the sizes are looked up in ``config.json`` and the tokenizer is
the bare one of ``tokenizer.json``. Where either has a form not known here, nothing is said, and the checks
are made after loading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preimage.models.locating import ModelFiles, folder_here, locate
from preimage.storage import parse_json

if TYPE_CHECKING:
    from preimage.models.language_model import LanguageModel

_SIZES = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "max_length": ("max_position_embeddings", "n_positions", "n_ctx"),
}


@dataclass(frozen=True)
class ModelPreview:
    """A model's sizes and tokenizer, from its files alone."""

    n_layers: int
    vocab_size: int
    d_model: int
    max_length: int | None
    tokenizer: BareTokenizer

    def describes(self, model: LanguageModel) -> bool:
        """Whether the model, once loaded, has these sizes and makes the same token ids."""
        sizes = all(getattr(self, size) == getattr(model, size) for size in _SIZES)
        return sizes and self.tokenizer.same_as(model.tokenizer)


class BareTokenizer:
    """As much of a transformers tokenizer as checking prompts needs."""

    def __init__(self, path: Path, bos: str | None) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))
        self.bos_token_id: int | None = self._tokenizer.token_to_id(bos) if bos else None

    def same_as(self, tokenizer: Any) -> bool:
        """Whether a transformers tokenizer makes the same token ids.

        Its inner one must be this to the byte; what is switched on around that (special tokens that are
        split) shows in a text that has every special token.
        """
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is None or tokenizer.bos_token_id != self.bos_token_id:
            return False
        text = f" A {' b'.join(tokenizer.all_special_tokens)}\n"
        same = (tokenizer(text, add_special_tokens=add)["input_ids"]
                == self(text, add_special_tokens=add)["input_ids"] for add in (True, False))  # fmt: skip
        return all(same) and inner.to_str() == self._tokenizer.to_str()

    def __call__(self, text: str, /, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Token ids of a text."""
        return {"input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self,
        ids: Sequence[int],
        /,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def read_preview(model: str | ModelFiles, revision: str | None = None) -> ModelPreview | None:
    """Sizes and tokenizer of a model by its name or its files, or None where only loading it will tell."""
    folder = (locate(model, revision) if isinstance(model, str) else model).path
    try:
        config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        tokens = parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        bos = tokens.get("bos_token")
        sizes = {size: _first(config, names) for size, names in _SIZES.items()}
        tokenizer = BareTokenizer(
            folder / "tokenizer.json", bos.get("content") if isinstance(bos, dict) else bos
        )
    except Exception:  # tokenizers raises bare Exception; whatever it is, loading will say it properly
        return None
    if None in (sizes["n_layers"], sizes["vocab_size"], sizes["d_model"]):
        return None
    return ModelPreview(**sizes, tokenizer=tokenizer)  # type: ignore[arg-type]


def tokenizer_here(name: str) -> BareTokenizer | None:
    """The tokenizer of a model that is on this disk, by its name; nothing is fetched or converted for it."""
    try:
        folder = folder_here(name)
        known = None if folder is None else read_preview(ModelFiles(name, folder, None))
    except (OSError, ValueError):  # a name that is none
        return None
    return None if known is None else known.tokenizer


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
