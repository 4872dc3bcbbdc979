"""From names to a model and its prompts: the ids are those of transformers, whatever the files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preimage.preparation import Preparation
from preimage.prompts import PromptOptions
from support.folders import VOCABULARY, make_folder, make_tokenizer
from support.tiny import NAMES, build

TEXTS = ["the cat", "a </s> b", " <s>x<unk>", "tab\tend\n"]
AS_GIVEN = PromptOptions(keep_duplicates=True)


def check(folder: Path) -> None:
    """Gathered before and after loading; what comes back at the end is what plain transformers makes."""
    prepared = Preparation(str(folder))
    prepared.prompts(TEXTS, AS_GIVEN)
    tokenizer = prepared.model.tokenizer
    assert [list(ids) for ids in prepared.prompts(TEXTS, AS_GIVEN)] == [
        tokenizer(text)["input_ids"] for text in TEXTS
    ]


@pytest.mark.parametrize("name", NAMES)  # some classes tokenise in their own way whatever the file says
def test_every_architecture(name: str, tmp_path: Path) -> None:
    build(name, vocab_size=VOCABULARY).save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    check(tmp_path / "m")


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "as it is": lambda config: None,
    "split special tokens": lambda config: config.update(split_special_tokens=True),
    "another class": lambda config: config.update(tokenizer_class="Qwen2Tokenizer"),
    "another bos": lambda config: config.update(bos_token="</s>"),
    "adds bos": lambda config: config.update(add_bos_token=True, tokenizer_class="LlamaTokenizer"),
    "adds no bos": lambda config: config.update(add_bos_token=False, tokenizer_class="LlamaTokenizer"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_said_around_the_tokenizer_counts(change: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    CHANGES[change](config)
    path.write_text(json.dumps(config))
    check(folder)
