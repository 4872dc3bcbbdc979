"""What is read of a model before it is loaded is what loading gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import preimage
from preimage.models import ALIASES, LanguageModel, read_preview
from support.folders import make_tokenizer
from support.tiny import NAMES, tiny

TEXTS = (
    "The patient was born in Lyon.",
    "def add(a, b):\n\treturn a + b  # naïve\r\n",
    " leading and trailing ",
    "1234567 …  \u2028 \u200b 🙂 e\u0301 ﬁ",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "\x00\x1b[31m",
)


@pytest.mark.real_model
def test_the_preview_agrees_with_the_loaded_model(smollm2: LanguageModel) -> None:
    known = read_preview("smollm2")
    assert known is not None
    same_sizes(known, smollm2)
    same_ids(known, smollm2)
    assert (known.n_layers, known.d_model, known.vocab_size, known.max_length) == (30, 576, 49152, 8192)
    assert smollm2.revision == f"sha256:{ALIASES['smollm2'].sha256}"


@pytest.mark.parametrize("name", NAMES)
def test_the_preview_agrees_for_every_architecture(name: str, tmp_path: Path) -> None:
    tiny(name).module.save_pretrained(tmp_path / "m")
    assert read_preview(str(tmp_path / "m")) is None  # without a tokenizer only loading will tell
    make_tokenizer().save_pretrained(tmp_path / "m")
    known = read_preview(str(tmp_path / "m"))
    assert known is not None
    model = preimage.load(tmp_path / "m")
    same_sizes(known, model)
    if name == "llama":  # some classes, Qwen2's first, tokenise in their own way whatever the file says
        same_ids(known, model)


def same_sizes(known: Any, model: LanguageModel) -> None:
    for size in ("n_layers", "d_model", "vocab_size", "max_length"):
        assert getattr(known, size) == getattr(model, size), size
    assert known.tokenizer.bos_token_id == model.tokenizer.bos_token_id


def same_ids(known: Any, model: LanguageModel) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = model.tokenizer(text, add_special_tokens=special)["input_ids"]
            assert known.tokenizer(text, add_special_tokens=special)["input_ids"] == ids
            assert known.tokenizer.decode(ids) == model.decode(ids)
